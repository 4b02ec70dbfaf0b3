import importlib.util
import json
import os
import threading

import pytest
import trio
import trio.testing

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.process_group.rank_protocol import Groups
from omni_proxy.weight_sync.delivery import proxy_rank as proxy_rank_module
from omni_proxy.weight_sync.delivery.proxy_rank import ProxyRank
from omni_proxy.weight_sync.store.service import StoreService
from tests.ports import free_port
from tests.weight_sync.store.drafts import delete_store

pytest.importorskip("torch")

PATIENCE_SECS = 60
TENSORS = [["bfloat16", [300, 7], 1], ["float32", [5], 2], ["int64", [], 3], ["uint8", [0, 4], 4]]


@pytest.fixture
def settings():
    # The receiver runs in a thread: the tests of process_group cover the child process.
    return {"isolation": "thread", "init_timeout_secs": 20, "receive_timeout_secs": 20}


@pytest.fixture
def read_settings(tmp_path, settings):
    """A function, as the configuration is read at each use: a test may change `settings`."""
    folder = str(tmp_path / "versions")
    return lambda: WeightSyncConfig(mode="receive", store_dir=folder, **settings)


@pytest.fixture
def store_service(tmp_path, read_settings):
    return StoreService(read_settings, tmp_path)


@pytest.fixture
async def rank(store_service, read_settings):
    proxy_rank = ProxyRank(store_service, read_settings)
    with trio.fail_after(PATIENCE_SECS):
        yield proxy_rank
        await proxy_rank.close()
    if store_service.store is not None:
        delete_store(store_service.store)


def body(tensors=TENSORS, names=None, **more):
    names = names or [f"t{seed}" for _, _, seed in tensors]
    dtypes = [dtype for dtype, _, _ in tensors]
    shapes = [shape for _, shape, _ in tensors]
    fields = {"names": names, "dtypes": dtypes, "shapes": shapes}
    return json.dumps({"group_name": "g", **fields, **more}).encode()


def batched(*buckets):
    parts = [json.loads(body(bucket)) for bucket in buckets]
    fields = {"group_name": "g", "buckets": parts, "num_buckets": len(parts)}
    return json.dumps(fields).encode()


async def join(rank, pool):
    trainer = pool.trainer()
    port = (await trio.to_thread.run_sync(lambda: trainer.tell("open", group="g")))["port"]
    place = {"master_address": "127.0.0.1", "master_port": str(port), "group_name": "g"}
    response = await rank.init({**place, "backend": "gloo"}, 1, 2)
    assert response.success, response
    assert trainer.reply() == {"joined": True}
    return trainer


async def send(trainer, tensors=TENSORS, **options):
    return await trio.to_thread.run_sync(
        lambda: trainer.tell("send", group="g", tensors=tensors, **options)
    )


async def leave(rank, trainer):
    response = await rank.destroy(b'{"group_name": "g"}')
    if trainer.living():
        trainer.tell("destroy", group="g")
    return response


async def test_a_two_phase_sync_becomes_a_version_in_one_file(rank, store_service, pool):
    trainer = await join(rank, pool)
    ready = await rank.prepare(batched(TENSORS[:2], TENSORS[2:]))
    assert (ready.success, ready.body["status"]) == (True, "ready")
    assert rank.status()["bytes_expected"] == 300 * 7 * 2 + 5 * 4 + 8
    await send(trainer)
    completed = await rank.complete(b'{"group_name": "g"}')
    assert (completed.success, completed.body["num_buckets_received"]) == (True, 2)
    version = await rank.seal("step-1")
    store = store_service.store
    assert list(version.manifest.files) == ["model.safetensors"]
    assert set(version.digests) == {"t1", "t2", "t3", "t4"}
    assert store.digest(version)
    assert (await leave(rank, trainer)).success
    assert store.versions()[0].manifest.label == "step-1"


@pytest.mark.parametrize("options", [{}, {"flattened": True}])
async def test_parts_received_one_by_one_become_one_version(rank, store_service, pool, options):
    trainer = await join(rank, pool)
    more = {"load_format": "flattened_bucket"} if options else {}
    for part in (TENSORS[:2], TENSORS[2:]):
        assert (await rank.prepare(body(part, **more))).success
        await send(trainer, part, **options)
        assert (await rank.complete(b'{"group_name": "g"}')).success
    version = await rank.seal(None)
    assert len(version.manifest.files) == 2
    assert set(version.digests) == {"t1", "t2", "t3", "t4"}
    assert store_service.store.digest(version)
    await leave(rank, trainer)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "isolation": "thread",
            "init_timeout_secs": 0,
            "ready_timeout_secs": 0,
            "receive_timeout_secs": 0,
            "stall_timeout_secs": 0,
        }
    ],
)
async def test_timeouts_of_zero_are_no_limit(rank, pool):
    trainer = await join(rank, pool)
    assert (await rank.prepare(body())).success
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, trainer)
        assert (await rank.complete(b'{"group_name": "g"}')).success
    await rank.seal("s")
    await leave(rank, trainer)


async def test_the_first_byte_has_the_ready_timeout_not_the_stall_timeout(pool, tmp_path):
    values = {"isolation": "thread", "stall_timeout_secs": 0.2, "ready_timeout_secs": 20}

    def now():
        return WeightSyncConfig(mode="receive", store_dir=str(tmp_path / "versions"), **values)

    store_service = StoreService(now, tmp_path)
    rank = ProxyRank(store_service, now)
    with trio.fail_after(PATIENCE_SECS):
        trainer = await join(rank, pool)
        tensors = TENSORS[:1]  # one tensor: between two, a slow machine could exceed the timeout
        assert (await rank.prepare(body(tensors))).success
        with trio.move_on_after(0.5):
            await trio.to_thread.run_sync(rank._pending.wait, 20, abandon_on_cancel=True)
        await send(trainer, tensors)
        assert (await rank.complete(b'{"group_name": "g"}')).success
        await rank.discard()
        await leave(rank, trainer)
        await rank.close()
    delete_store(store_service.store)


async def test_an_update_call_is_both_phases(rank, pool):
    trainer = await join(rank, pool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, trainer)
        assert (await rank.update(body())).success
    assert len((await rank.seal("s")).digests) == 4
    await leave(rank, trainer)


async def test_a_receive_that_is_not_completed_leaves_no_files(rank, store_service, pool, tmp_path):
    trainer = await join(rank, pool)
    assert (await rank.prepare(body())).success
    folder = rank._draft.folder
    assert folder.is_dir()
    assert (await leave(rank, trainer)).success
    assert not folder.exists()
    assert not store_service.store.in_use
    with pytest.raises(LookupError):
        await rank.seal("s")


async def test_a_trainer_that_dies_during_a_send_leaves_no_version(rank, pool):
    trainer = await join(rank, pool)
    assert (await rank.prepare(body())).success
    folder = rank._draft.folder
    await send(trainer, stop_after=1)
    trainer.kill()
    completed = await rank.complete(b'{"group_name": "g"}')
    assert (completed.status, completed.body["success"]) == (400, False)
    assert not folder.exists()
    await leave(rank, trainer)


async def test_a_version_that_does_not_fit_is_refused_with_the_sizes(rank, pool):
    trainer = await join(rank, pool)
    response = await rank.prepare(body([["float32", [1 << 20, 1 << 24], 1]]))
    assert response.status == 400
    assert f"needs {(1 << 46) + 512} bytes" in response.body["message"]
    assert "free" in response.body["message"]
    assert rank._draft is None
    assert (await rank.prepare(body())).success
    await leave(rank, trainer)


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b'{"group_name": "g"}', "nothing is announced"),
        (body(names=["a", "a", "b", "c"]), "'a' is announced twice"),
    ],
)
async def test_a_malformed_call_is_refused_and_arms_nothing(rank, pool, request_body, message):
    trainer = await join(rank, pool)
    response = await rank.prepare(request_body)
    assert (response.status, message in response.body["message"]) == (400, True), response
    assert rank.status() == {"armed": False}
    await leave(rank, trainer)


async def test_calls_in_the_wrong_state_are_refused(rank):
    for call in (rank.prepare(body()), rank.complete(b"{}"), rank.update(body())):
        response = await call
        assert (response.status, response.body["success"]) == (400, False)
    assert (await rank.destroy(b"{}")).success


async def test_two_tasks_that_open_the_receiver_share_it(rank, pool, monkeypatch):
    opened, resume, open_receiver = [], threading.Event(), proxy_rank_module.open_receiver

    def open_slowly(*arguments, **named):
        opened.append(open_receiver(*arguments, **named))
        resume.wait(PATIENCE_SECS)
        return opened[-1]

    monkeypatch.setattr(proxy_rank_module, "open_receiver", open_slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank.warm_up)
        nursery.start_soon(rank.warm_up)
        await trio.testing.wait_all_tasks_blocked()
        resume.set()
    assert len(opened) == 1
    await leave(rank, await join(rank, pool))


async def test_the_child_process_ends_when_the_mode_is_off_and_the_group_has_ended(
    pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(proxy_rank_module, "UNUSED_POLL_SECS", 0.01)
    modes = ["receive"]

    def now():
        return WeightSyncConfig(mode=modes[-1], store_dir=str(tmp_path / "versions"))

    store_service = StoreService(now, tmp_path)
    rank = ProxyRank(store_service, now)
    with trio.fail_after(PATIENCE_SECS):
        trainer = await join(rank, pool)
        receiver = rank._receiver
        assert receiver.busy()
        modes.append("coordinate")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank.close_when_unused)
            await rank.prepare(body())
            await send(trainer)
            assert (await rank.complete(b'{"group_name": "g"}')).success
            modes.append("both")  # enabled again before the child could end
        assert rank._receiver is receiver
        modes.append("off")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank.close_when_unused)
            assert (await leave(rank, trainer)).success
        assert rank._receiver is None
        with pytest.raises(proxy_rank_module.GroupError, match="shutting down"):
            receiver.sender(proxy_rank_module.HostedRendezvous("127.0.0.1", 2, "h", "gloo", 1.0))
        await rank.warm_up()  # the mode is off now
        assert rank._receiver is None
        modes.append("receive")
        await leave(rank, await join(rank, pool))
        await rank.close()
    delete_store(store_service.store)


@pytest.mark.parametrize("settings", [{"isolation": "thread", "init_timeout_secs": 120}])
async def test_a_destroy_during_a_join_leaves_no_group(rank, monkeypatch):
    begun, resume = threading.Event(), threading.Event()

    def wait_for_resume(*_):
        begun.set()
        resume.wait(PATIENCE_SECS)

    monkeypatch.setattr(Groups, "_replace_dead_group", wait_for_resume)
    place = {"master_address": "127.0.0.1", "master_port": free_port(), "group_name": "g"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank.init, place, 1, 2)
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
    await rank.destroy(b'{"group_name": "g"}')
    resume.set()
    while any(thread.name == "weights-rank-init" for thread in threading.enumerate()):  # noqa: ASYNC110
        await trio.sleep(0.01)
    assert rank._receiver.status()["groups"] == []


async def test_a_destroy_does_not_wait_for_other_calls_of_its_group(rank, pool):
    trainer = await join(rank, pool)
    calls = rank._threads._call_limiter
    while calls.available_tokens:
        calls.acquire_on_behalf_of_nowait(object())
    assert (await leave(rank, trainer)).success
    assert rank._receiver.status()["groups"] == []


async def test_without_torch_the_error_names_what_to_install(rank, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "torch" else find_spec(name),
    )
    await rank.warm_up()
    response = await rank.init({"master_address": "127.0.0.1", "master_port": 1}, 1, 2)
    assert response.status == 400
    assert "pip install 'omni-proxy[weights]'" in response.body["message"]


async def test_a_store_folder_in_use_is_the_error_of_an_init(rank, tmp_path):
    from omni_proxy.weight_sync.store.version_store import VersionStore

    os.makedirs(tmp_path / "versions")
    other = VersionStore(tmp_path / "versions")
    response = await rank.init({"master_address": "127.0.0.1", "master_port": 1}, 1, 2)
    assert (response.status, "in use by another" in response.body["message"]) == (400, True)
    other.close()
