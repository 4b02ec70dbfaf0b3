import pytest
import trio

from omni_proxy.supervisor import (
    CALM_SECS,
    FIRST_PAUSE_SECS,
    LONGEST_PAUSE_SECS,
    Supervisor,
)


class Room:
    """Fails as told: each life lasts so many seconds; a life of None goes on for ever."""

    def __init__(self, *lives: float | None) -> None:
        self.lives = list(lives)
        self.starts: list[float] = []

    async def run(self, told) -> None:
        self.starts.append(trio.current_time())
        life = self.lives.pop(0)
        told.started()
        if life is None:
            await trio.sleep_forever()
        await trio.sleep(life)
        raise RuntimeError("broken")


def pauses(room: Room, lives: list[float]) -> list[float]:
    ends = [start + life for start, life in zip(room.starts, lives, strict=False)]
    return [round(start - end, 6) for start, end in zip(room.starts[1:], ends, strict=False)]


@pytest.fixture
def clock(autojump_clock):
    return autojump_clock


async def test_the_pause_doubles_up_to_its_limit(nursery, clock):
    lives = [0.0] * 9
    room = Room(*lives, None)
    await nursery.start(Supervisor("room", room.run).run)
    await trio.sleep(200)
    assert pauses(room, lives) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert (FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS) == (0.5, 30)


async def test_a_calm_run_starts_the_back_off_anew(nursery, clock):
    lives = [0.0, 0.0, CALM_SECS + 1, 0.0]
    room = Room(*lives, None)
    await nursery.start(Supervisor("room", room.run).run)
    await trio.sleep(200)
    assert pauses(room, lives) == [0.5, 1, 0.5, 1]


async def test_its_row_says_what_happened(nursery, clock):
    room = Room(1.0, None)
    supervisor = Supervisor("room", room.run)
    assert supervisor.status()["state"] == "starting"
    await nursery.start(supervisor.run)
    assert supervisor.status()["state"] == "running"
    assert supervisor.status()["last_error"] is None
    await trio.sleep(1.2)
    row = supervisor.status()
    assert (row["name"], row["state"], row["restarts"]) == ("room", "backing_off", 1)
    assert row["last_error"] == "RuntimeError: broken"
    await trio.sleep(1)
    assert supervisor.status()["state"] == "running"


async def test_a_first_run_that_fails_does_not_block_the_start(nursery, clock):
    async def run(told):
        raise OSError("no disk")

    supervisor = Supervisor("room", run)
    await nursery.start(supervisor.run)
    assert supervisor.status()["state"] == "backing_off"


async def test_the_reason_inside_nested_groups_is_told(nursery, clock):
    async def run(told):
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("lost")])])

    supervisor = Supervisor("room", run)
    await nursery.start(supervisor.run)
    assert supervisor.status()["last_error"] == "KeyError: 'lost'"


async def test_a_run_that_returns_has_ended_and_is_not_restarted(nursery, clock):
    starts = []

    async def run(told):
        starts.append(told)

    supervisor = Supervisor("room", run)
    await nursery.start(supervisor.run)
    await trio.sleep(100)
    assert (supervisor.status()["state"], len(starts)) == ("ended", 1)


async def test_cancellation_passes_through(clock):
    supervisor = Supervisor("room", Room(None).run)
    with trio.move_on_after(5) as scope:
        await supervisor.run()
    assert scope.cancelled_caught
    assert supervisor.status()["restarts"] == 0
