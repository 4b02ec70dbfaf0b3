import pytest

from omni_proxy.routing.version_constraint import VersionConstraint
from tests.dataplane.queue_fixture import Room
from tests.fleet.entries import NOW, entry, heal

QUEUE = "queue_size = 9\n"


@pytest.fixture
def room_of():
    rooms = []

    def build(*entries, queue=QUEUE, updating="hold", paused="pass"):
        rules = (
            f"[weight_sync]\nwhile_updating = '{updating}'\n[routing]\nwhile_paused = '{paused}'"
        )
        rooms.append(Room(*entries, config=queue + rules))
        return rooms[-1]

    yield build
    for room in rooms:
        room.close()


def cordon(room, *holds):
    for worker, reasons in zip(room.fleet.workers, holds, strict=True):
        for reason in reasons:
            room.fleet.cordon(worker, reason)


SHED = "updating shed"
RULES = {
    "hold": {"updating": "hold", "paused": "hold"},
    "updating shed": {"updating": "shed", "paused": "hold"},
    "paused shed": {"updating": "hold", "paused": "shed"},
    "paused pass": {"updating": "shed", "paused": "pass"},
    "all pass": {"updating": "pass", "paused": "pass"},
}


@pytest.mark.parametrize(
    ("rules", "holds", "refused"),
    [
        ("hold", [{"updating"}], None),
        ("hold", [{"paused"}], None),
        ("hold", [{"uncertain"}], None),
        ("all pass", [{"uncertain"}], None),
        ("updating shed", [{"updating"}], "weights_updating"),
        ("updating shed", [{"uncertain"}], "weights_uncertain"),
        ("updating shed", [{"paused"}], None),
        ("updating shed", [{"launch"}], None),
        ("updating shed", [{"updating"}, {"launch"}], None),
        ("updating shed", [{"updating"}, {"paused"}], None),
        ("updating shed", [{"updating"}, {"uncertain"}], "weights_updating"),
        ("paused shed", [{"paused"}], "paused"),
        ("paused shed", [{"updating"}], None),
        ("paused shed", [{"paused", "updating"}], "weights_updating"),
        ("paused shed", [{"paused"}, {"updating"}], None),
        ("paused pass", [{"paused"}], "paused"),  # cordoned only while the call itself runs
    ],
)
def test_the_configuration_decides_whether_a_request_may_wait(room_of, rules, holds, refused):
    room = room_of(*(entry(f"w{number}") for number in range(len(holds))), **RULES[rules])
    cordon(room, *holds)
    waiter = room.arrive()
    assert (waiter.refusal.code if waiter.refusal else None) == refused
    assert room.queue.waiting == (0 if refused else 1)


def test_a_request_may_wait_for_a_worker_that_is_only_full(room_of):
    room = room_of(entry("a"), entry("b", max_inflight=1), **RULES[SHED])
    cordon(room, {"updating"}, ())
    first, waiter = room.arrive(), room.arrive()
    assert (room.admitted, room.queue.waiting) == ([first], 1)
    first.finish()
    room.run_ready_tasks()
    assert room.admitted == [waiter]


def test_a_waiter_is_admitted_when_the_update_ends(room_of):
    room = room_of(entry("a"), **RULES["hold"])
    cordon(room, {"updating"})
    waiter = room.arrive()
    room.fleet.set_version(room.fleet.workers[0], "v2", 1)
    room.run_ready_tasks()
    assert room.admitted == []
    room.fleet.uncordon(room.fleet.workers[0], "updating")
    room.run_ready_tasks()
    assert (room.admitted, waiter.exchange.weight_version.label) == ([waiter], "v2")


def test_without_a_queue_the_error_names_the_reason(room_of):
    room = room_of(entry("a"), queue="", **RULES["hold"])
    cordon(room, {"updating"})
    assert room.arrive().refusal.code == "weights_updating"


def test_the_error_has_the_time_since_the_cordon(room_of):
    room = room_of(entry("a"), entry("b"), **RULES[SHED])
    a, b = room.fleet.workers
    room.fleet.cordon(a, "updating")
    room.dataplane.loop.now += 5
    room.fleet.cordon(b, "updating")
    room.fleet.cordon(a, "paused")
    room.dataplane.loop.now += 2.4
    refusal = room.arrive().refusal
    assert refusal.message.endswith(
        "every worker that could take it is being updated or paused by a trainer, for 7 s so far"
    )
    assert refusal.headers == (("retry-after", "1"),)
    for hold in ("updating", "paused"):
        room.fleet.uncordon(a, hold)
    room.fleet.uncordon(b, "updating")
    room.fleet.cordon(a, "updating")
    room.fleet.cordon(b, "updating")
    assert room.arrive().refusal.message.endswith("being updated, for 0 s so far")


def test_a_dead_worker_does_not_change_the_rule(room_of):
    room = room_of(entry("a"), entry("b"), **RULES[SHED])
    cordon(room, {"updating"}, ())
    room.fleet.mark_dead(room.fleet.workers[1], NOW)
    assert room.arrive().refusal.code == "weights_updating"


def test_a_request_for_another_version_waits_and_blocks_no_other(room_of):
    room = room_of(entry("a"), entry("b"), **RULES["hold"])
    a, b = room.fleet.workers
    room.fleet.set_version(a, "v1", 1)
    later = room.arrive(version=VersionConstraint("v2"))
    epoch = room.arrive(version=VersionConstraint(None, 2))
    now = room.arrive()
    assert (room.admitted, room.queue.waiting) == ([now], 2)
    room.fleet.set_version(b, "v1", 2)
    room.run_ready_tasks()
    assert (room.admitted, epoch.exchange.worker) == ([now, epoch], b)
    room.fleet.set_version(a, "v2", 3)
    room.run_ready_tasks()
    assert (room.admitted, later.exchange.worker) == ([now, epoch, later], a)


def test_without_a_queue_a_request_for_another_version_is_rejected(room_of):
    room = room_of(entry("a"), queue="", **RULES["hold"])
    refusal = room.arrive(version=VersionConstraint("v2")).refusal
    assert (refusal.status, refusal.code) == (503, "weight_version_unavailable")
    assert refusal.headers == (("retry-after", "1"),)


def test_a_request_waits_for_an_update_to_its_version_while_others_are_shed(room_of):
    room = room_of(entry("a"), **RULES[SHED])
    (worker,) = room.fleet.workers
    room.fleet.set_version(worker, "v1", 1)
    cordon(room, {"updating"})
    assert room.arrive(version=VersionConstraint("v1")).refusal.code == "weights_updating"
    waiter = room.arrive(version=VersionConstraint("v2"))
    room.fleet.set_version(worker, "v2", 2)
    room.fleet.uncordon(worker, "updating")
    room.run_ready_tasks()
    assert room.admitted == [waiter]


def test_removed_workers_are_forgotten(room_of):
    room = room_of(entry("a"), entry("b"), **RULES[SHED])
    cordon(room, {"updating"}, {"updating"})
    room.fleet.apply([entry("b")], NOW)
    assert list(room.dataplane.update_gate._since) == room.fleet.workers
    room.fleet.apply([entry("b"), entry("c")], NOW)
    heal(room.fleet, room.fleet.workers[1])
    assert room.arrive().refusal is None
