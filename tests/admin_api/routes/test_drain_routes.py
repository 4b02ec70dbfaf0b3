import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.admin_api.api_fixture import A, B

AT = f"/workers/{A}"


@pytest.fixture
async def running(api, nursery):
    """The API with its drain service running; A is busy."""
    api.healthy(A, B)
    api.worker(A).in_flight = 1
    await nursery.start(api.drains.run)
    return api


async def draining(api):
    return (await (await api.client().get(AT)).get_json())["draining"]


async def drain(api, **body):
    answer = await api.client().post(f"{AT}/drain", json=body)
    return answer.status_code, await answer.get_json()


async def test_it_stops_new_requests_and_reports_how_the_running_ones_go(running):
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


async def test_a_worker_that_does_nothing_is_drained_already(running):
    running.worker(A).in_flight = 0
    status, body = await drain(running)
    assert (status, body["status"]) == (200, "drained")


async def test_zero_is_no_deadline_and_none_is_the_configured_one(running):
    await drain(running, timeout_secs=0)
    assert (await draining(running))["deadline"] is None
    await drain(running)
    assert running.drains.secs_left(running.worker(A)) == pytest.approx(120, abs=5)


async def test_enabling_ends_it(running):
    await drain(running)
    await running.client().put(AT, json={"disabled": False})
    assert await draining(running) is None
    assert running.worker(A).routable


@pytest.mark.parametrize("secs", [-1, "soon", True, [], 1e12, "nan", {}])
async def test_a_deadline_that_is_none_is_refused_and_nothing_changes(running, secs):
    status, body = await drain(running, timeout_secs=secs)
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert not running.worker(A).disabled


async def test_a_worker_that_is_not_there_is_a_404(running):
    answer = await running.client().post("/workers/nobody/drain")
    assert answer.status_code == 404
    assert (await running.client().delete("/workers/nobody?drain=true")).status_code == 404


async def test_a_removal_waits_for_what_runs(running, nursery):
    answers = []

    async def remove():
        answers.append(await running.client().delete(f"{AT}?drain=true&timeout_secs=60"))

    nursery.start_soon(remove)
    await wait_all_tasks_blocked(0.01)
    assert running.fleet.find(A).disabled
    assert not answers
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while not answers:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert running.fleet.find(A) is None
    assert (await answers[0].get_json())["drained"] is True


async def test_a_removal_at_its_deadline_reports_requests_in_flight(running):
    with trio.fail_after(30):
        answer = await running.client().delete(f"{AT}?drain=true&timeout_secs=0.05")
    assert (await answer.get_json())["drained"] is False
    assert running.fleet.find(A) is None


async def test_prefer_respond_async_returns_during_the_drain(running):
    client = running.client()
    answer = await client.delete(f"{AT}?drain=true", headers={"Prefer": "respond-async"})
    assert (answer.status_code, (await answer.get_json())["status"]) == (202, "accepted")
    assert (await draining(running))["state"] == "draining"
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while running.fleet.find(A):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_plain_removal_does_not_wait(running):
    answer = await running.client().delete(AT)
    assert "drained" not in await answer.get_json()
    assert running.fleet.find(A) is None


async def test_enabling_a_draining_worker_cancels_the_removal(running, nursery):
    answers = []

    async def remove():
        answers.append(await running.client().delete(f"{AT}?drain=true"))

    nursery.start_soon(remove)
    await wait_all_tasks_blocked(0.01)
    await running.client().put(AT, json={"disabled": False})
    with trio.fail_after(30):
        while not answers:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert answers[0].status_code == 409
    assert (await answers[0].get_json())["error"]["code"] == "drain_cancelled"
    assert running.worker(A).routable


async def test_a_removal_continues_after_its_caller_disconnects(running):
    async with trio.open_nursery() as callers:
        callers.start_soon(running.client().delete, f"{AT}?drain=true")
        await wait_all_tasks_blocked(0.01)
        assert running.fleet.find(A).disabled
        callers.cancel_scope.cancel()
    assert running.fleet.find(A) is not None
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while running.fleet.find(A):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_drain_must_be_yes_or_no(running):
    answer = await running.client().delete(f"{AT}?drain=maybe")
    assert answer.status_code == 400
    assert running.fleet.find(A) is not None
