import pytest
import trio

from omni_proxy.picker.client import (
    AsyncWorkerPicker,
    NoWorkerNow,
    PickerError,
    ReservedWorker,
    WorkerPicker,
)
from tests.promises.support.fleet_program import chat, program, record, toml, workers


@pytest.fixture
async def running(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as (worker,):
        config = toml([worker], more='[admin]\napi_key = "k"\n').replace(
            "[[workers]]\n", '[[workers]]\nmax_inflight = 1\nmodel = "m"\n'
        )
        file.write_text(config)
        async with program("--config", file) as proxy:
            await proxy.until_routable(worker)
            yield proxy, worker


async def in_flight(proxy, worker):
    return record(await proxy.get_json("/workers"), worker)["in_flight"]


async def test_a_worker_is_busy_from_acquire_to_release_for_relayed_requests_too(
    running,
):
    proxy, worker = running
    url = str(proxy.client.base_url)

    def acquire_and_release() -> tuple[ReservedWorker, str, bool, bool]:
        picker = WorkerPicker(url, api_key="k")
        first = picker.acquire(chat(model="m"), session_id="s", lease_secs=60)
        with pytest.raises(NoWorkerNow) as busy:
            picker.acquire(chat(model="m"))
        released = picker.release(first), picker.release(first)
        picker.close()
        return first, busy.value.code, *released

    first, code, *released = await trio.to_thread.run_sync(acquire_and_release)
    assert (first.url, first.lease_secs, code) == (worker.url, 60, "all_full")
    assert released == [True, False]
    assert await in_flight(proxy, worker) == 0
    picker = AsyncWorkerPicker(url, api_key="k")
    async with picker.worker(chat()) as reserved:
        assert (reserved.url, await in_flight(proxy, worker)) == (worker.url, 1)
        assert (await proxy.ask()).status_code == 503
    assert (await proxy.ask()).status_code == 200
    with trio.CancelScope() as scope:
        async with picker.worker(chat()):
            scope.cancel()
            await trio.sleep_forever()
    assert await in_flight(proxy, worker) == 0
    with pytest.raises(PickerError) as unknown:
        await picker.acquire(model_name="x")
    assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
    await picker.close()
    stranger = AsyncWorkerPicker(url)
    with pytest.raises(PickerError) as refused:
        await stranger.acquire()
    assert refused.value.status == 401
    await stranger.close()
