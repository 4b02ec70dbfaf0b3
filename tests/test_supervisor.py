import pytest
import trio
import trio.testing

from omni_proxy.supervisor import (
    FIRST_PAUSE_SECS,
    MAX_PAUSE_SECS,
    RESET_SECS,
    Supervisor,
)


class FailingService:
    """Each run fails after a number of seconds; a run with None never ends."""

    def __init__(self, *runs: float | None) -> None:
        self.runs = list(runs)
        self.starts: list[float] = []

    async def run(self, task_status) -> None:
        self.starts.append(trio.current_time())
        secs = self.runs.pop(0)
        task_status.started()
        if secs is None:
            await trio.sleep_forever()
        await trio.sleep(secs)
        raise RuntimeError("broken")


def pauses(service: FailingService, runs: list[float]) -> list[float]:
    ends = [start + secs for start, secs in zip(service.starts, runs, strict=False)]
    return [round(start - end, 6) for start, end in zip(service.starts[1:], ends, strict=False)]


@pytest.fixture
def clock(autojump_clock):
    return autojump_clock


async def test_the_pause_doubles_up_to_its_limit(nursery, clock):
    runs = [0.0] * 9
    service = FailingService(*runs, None)
    await nursery.start(Supervisor("service", service.run).run)
    await trio.sleep(200)
    assert pauses(service, runs) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert (FIRST_PAUSE_SECS, MAX_PAUSE_SECS) == (0.5, 30)


async def test_a_long_run_resets_the_back_off(nursery, clock):
    runs = [0.0, 0.0, RESET_SECS + 1, 0.0]
    service = FailingService(*runs, None)
    await nursery.start(Supervisor("service", service.run).run)
    await trio.sleep(200)
    assert pauses(service, runs) == [0.5, 1, 0.5, 1]


async def test_the_status_row_shows_the_failure(nursery, clock):
    service = FailingService(1.0, None)
    supervisor = Supervisor("service", service.run)
    assert supervisor.status()["state"] == "starting"
    await nursery.start(supervisor.run)
    assert supervisor.status()["state"] == "running"
    assert supervisor.status()["last_error"] is None
    await trio.sleep(1.2)
    row = supervisor.status()
    assert (row["name"], row["state"], row["restarts"]) == ("service", "backing_off", 1)
    assert row["last_error"] == "RuntimeError: broken"
    await trio.sleep(1)
    assert supervisor.status()["state"] == "running"


async def test_a_first_run_that_fails_does_not_block_the_start(nursery, clock):
    async def run(*, task_status):
        raise OSError("no disk")

    supervisor = Supervisor("service", run)
    await nursery.start(supervisor.run)
    assert supervisor.status()["state"] == "backing_off"


async def test_the_error_inside_nested_groups_is_shown(nursery, clock):
    async def run(*, task_status):
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("lost")])])

    supervisor = Supervisor("service", run)
    await nursery.start(supervisor.run)
    assert supervisor.status()["last_error"] == "KeyError: 'lost'"


async def test_a_run_that_returns_has_ended_and_is_not_restarted(nursery, clock):
    starts = []

    async def run(*, task_status):
        starts.append(task_status)

    supervisor = Supervisor("service", run)
    await nursery.start(supervisor.run)
    await trio.sleep(100)
    assert (supervisor.status()["state"], len(starts)) == ("ended", 1)


async def test_cancellation_passes_through(clock):
    supervisor = Supervisor("service", FailingService(None).run)
    with trio.move_on_after(5) as scope:
        await supervisor.run()
    assert scope.cancelled_caught
    assert supervisor.status()["restarts"] == 0


def test_a_service_that_was_renamed_has_a_row_under_its_old_name_too():
    new, old = Supervisor("ticker", lambda status: None, old_name="pulse").rows()
    assert (new["name"], new["state"]) == ("ticker", "starting")
    assert old == {**new, "name": "pulse", "same_as": "ticker"}
    assert Supervisor("drains", lambda status: None).rows()[0].keys() == new.keys()


async def test_a_service_that_was_stopped_runs_again(nursery, clock):
    service = FailingService(None, None)
    supervisor = Supervisor("service", service.run)
    await nursery.start(supervisor.run)
    for runs in (2, 3):
        await supervisor.stop()
        assert supervisor.status()["state"] == "ended"
        service.runs.append(None)
        supervisor.resume()
        await trio.testing.wait_all_tasks_blocked()
        assert (supervisor.status()["state"], len(service.starts)) == ("running", runs)
