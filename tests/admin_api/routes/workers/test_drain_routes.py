import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.admin_api.api_fixture import A, B

WORKER = f"/workers/{A}"


@pytest.fixture
async def running(api, nursery):
    """The API with its drain service running; A is busy."""
    api.healthy(A, B)
    api.worker(A).in_flight = 1
    await nursery.start(api.drains.run)
    return api


async def draining(api):
    return (await (await api.client().get(WORKER)).get_json())["draining"]


async def drain(api, **body):
    response = await api.client().post(f"{WORKER}/drain", json=body)
    return response.status_code, await response.get_json()


async def test_a_drain_stops_new_requests_and_reports_those_in_flight(running):
    status, body = await drain(running, timeout_secs=60)
    assert (status, body["status"]) == (202, "draining")
    assert (body["worker"]["disabled"], body["worker"]["routable"]) == (True, False)
    shown = await draining(running)
    assert (shown["state"], shown["in_flight"]) == ("draining", 1)
    assert shown["since"] < shown["deadline"]
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while (await draining(running))["state"] != "drained":  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert running.fleet.find(A).disabled


async def test_an_idle_worker_is_drained_at_once(running):
    running.worker(A).in_flight = 0
    status, body = await drain(running)
    assert (status, body["status"]) == (200, "drained")


async def test_zero_means_no_deadline_and_no_timeout_means_the_configured_one(running):
    await drain(running, timeout_secs=0)
    assert (await draining(running))["deadline"] is None
    await drain(running)
    assert running.drains.secs_left(running.worker(A)) == pytest.approx(120, abs=5)


async def test_enabling_a_worker_ends_its_drain(running):
    await drain(running)
    await running.client().put(WORKER, json={"disabled": False})
    assert await draining(running) is None
    assert running.worker(A).routable


@pytest.mark.parametrize("secs", [-1, "soon", True, [], 1e12, "nan", {}])
async def test_an_invalid_timeout_is_refused_and_changes_nothing(running, secs):
    status, body = await drain(running, timeout_secs=secs)
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert not running.worker(A).disabled


async def test_an_unknown_worker_gets_a_404(running):
    response = await running.client().post("/workers/unknown/drain")
    assert response.status_code == 404
    assert (await running.client().delete("/workers/unknown?drain=true")).status_code == 404


async def test_a_removal_waits_for_requests_in_flight(running, nursery):
    responses = []

    async def remove():
        responses.append(await running.client().delete(f"{WORKER}?drain=true&timeout_secs=60"))

    nursery.start_soon(remove)
    await wait_all_tasks_blocked(0.01)
    assert running.fleet.find(A).disabled
    assert not responses
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while not responses:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert running.fleet.find(A) is None
    assert (await responses[0].get_json())["drained"] is True


async def test_a_removal_at_its_deadline_reports_requests_in_flight(running):
    with trio.fail_after(30):
        response = await running.client().delete(f"{WORKER}?drain=true&timeout_secs=0.05")
    assert (await response.get_json())["drained"] is False
    assert running.fleet.find(A) is None


async def test_prefer_respond_async_returns_during_the_drain(running):
    client = running.client()
    response = await client.delete(f"{WORKER}?drain=true", headers={"Prefer": "respond-async"})
    assert (response.status_code, (await response.get_json())["status"]) == (202, "accepted")
    assert (await draining(running))["state"] == "draining"
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while running.fleet.find(A):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_plain_removal_does_not_wait(running):
    response = await running.client().delete(WORKER)
    assert "drained" not in await response.get_json()
    assert running.fleet.find(A) is None


async def test_enabling_a_draining_worker_cancels_the_removal(running, nursery):
    responses = []

    async def remove():
        responses.append(await running.client().delete(f"{WORKER}?drain=true"))

    nursery.start_soon(remove)
    await wait_all_tasks_blocked(0.01)
    await running.client().put(WORKER, json={"disabled": False})
    with trio.fail_after(30):
        while not responses:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert responses[0].status_code == 409
    assert (await responses[0].get_json())["error"]["code"] == "drain_cancelled"
    assert running.worker(A).routable


async def test_a_removal_continues_after_its_caller_disconnects(running):
    async with trio.open_nursery() as callers:
        callers.start_soon(running.client().delete, f"{WORKER}?drain=true")
        await wait_all_tasks_blocked(0.01)
        assert running.fleet.find(A).disabled
        callers.cancel_scope.cancel()
    assert running.fleet.find(A) is not None
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while running.fleet.find(A):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_drain_must_be_true_or_false(running):
    response = await running.client().delete(f"{WORKER}?drain=maybe")
    assert response.status_code == 400
    assert running.fleet.find(A) is not None
