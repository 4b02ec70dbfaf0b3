from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api_keys.caller_limits import ApiCaller, LocalRows
from omni_proxy.config.tables.keys import CallerKey
from tests.dataplane.queue_fixture import Room, Waiter
from tests.fleet.entries import entry


def prioritized(room, priority, model=None):
    """A waiter whose caller has this priority."""
    key = CallerKey(name=f"p{priority}", key_sha256="00" * 32, priority=priority)
    waiter = Waiter(room, model)
    waiter.exchange.caller = ApiCaller(key, 1, LocalRows(), lambda ended: (0, 0))
    waiter.start()
    return waiter


def order_of_admission(room, holder, waiters):
    """The indexes of the waiters in order of admission; each ends as soon as it is admitted."""
    holder.finish()
    order = []
    for _ in waiters:
        room.run_ready_tasks()
        (admitted,) = room.admitted
        order.append(waiters.index(admitted))
        admitted.finish()
    return order


def pass_secs(room, secs):
    room.dataplane.loop.now += secs


ONE_AT_A_TIME = "queue_size = 100\nmax_inflight = 1\n"


def test_waiters_are_admitted_by_priority_and_equal_ones_in_order(room_of):
    room = room_of(entry("a"), config=ONE_AT_A_TIME)
    holder = room.arrive()
    waiters = [prioritized(room, priority) for priority in (0, 5, 0, 5, 9)]
    assert order_of_admission(room, holder, waiters) == [4, 1, 3, 0, 2]


def test_a_request_that_waits_gains_priority(room_of):
    room = room_of(entry("a"), config=ONE_AT_A_TIME + "priority_aging_secs = 2")
    holder = room.arrive()
    waiters = [prioritized(room, 0)]
    pass_secs(room, 3.9)  # less than two steps of aging
    waiters.append(prioritized(room, 2))
    pass_secs(room, 0.2)
    waiters.append(prioritized(room, 2))  # more than two steps later than the first
    assert order_of_admission(room, holder, waiters) == [1, 0, 2]


def test_without_aging_a_low_priority_waits_for_all_others(room_of):
    room = room_of(entry("a"), config=ONE_AT_A_TIME + "priority_aging_secs = 0")
    holder = room.arrive()
    waiters = [prioritized(room, 0)]
    pass_secs(room, 20)
    waiters.append(prioritized(room, 1))
    assert order_of_admission(room, holder, waiters) == [1, 0]


def test_a_reload_of_aging_applies_to_waiting_requests(room_of):
    room = room_of(entry("a"), config=ONE_AT_A_TIME + "priority_aging_secs = 0")
    holder = room.arrive()
    waiters = [prioritized(room, 0)]
    pass_secs(room, 20)
    waiters.append(prioritized(room, 1))
    room.reconfigure(ONE_AT_A_TIME + "priority_aging_secs = 5")
    assert order_of_admission(room, holder, waiters) == [0, 1]


STEPS = st.tuples(st.sampled_from(["m", "n"]), st.integers(-2, 2), st.sampled_from([0, 1, 3]))


@given(st.lists(STEPS, max_size=12), st.sampled_from([0, 2]))
def test_lines_of_two_models_share_the_slots_by_priority(steps, aging):
    """Compares the queue with a sorted list."""
    config = ONE_AT_A_TIME + f"priority_aging_secs = {aging}"
    room = Room(entry("a", model="m"), entry("b", model="n"), config=config)
    holder = room.arrive("m")
    waiters, expected = [], []
    for model, priority, secs in steps:
        pass_secs(room, secs)
        waiters.append(prioritized(room, priority, model))
        since = room.dataplane.loop.now
        key = (-priority, since) if not aging else (since - priority * aging,)
        expected.append((key, len(expected)))
    order = order_of_admission(room, holder, waiters)
    room.close()
    assert order == [number for _, number in sorted(expected)]
