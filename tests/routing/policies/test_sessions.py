from collections import Counter, OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.policies.session_load import DROPPED_PER_SLICE, OwnSessions, fewest_sessions
from tests.routing.policies.chats import weighted, workers

MOST, IDLE_SECS = 4, 10.0
steps = st.lists(
    st.tuples(
        st.sampled_from(["keep", "finish", "maintain"]),
        st.sampled_from("abcdefg"),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 6.0]),
    ),
    max_size=60,
)


@given(steps)
def test_the_table_equals_a_naive_model(operations):
    """The model keeps sessions in the order of their last use, and counts them on demand."""
    fleet, now = workers(0, 0, 0), 0.0
    table = OwnSessions()
    table.tune(MOST, IDLE_SECS)
    plain = OrderedDict()
    for step, key, number, secs in operations:
        now += secs
        if step == "keep":
            table.keep(key, fleet[number], now)
            plain[key] = (fleet[number], now)
            plain.move_to_end(key)
            while len(plain) > MOST:
                plain.popitem(last=False)
        elif step == "finish":
            assert table.finish(key) is (plain.pop(key, None) is not None)
        else:
            table.maintain(now)
            for idle in [name for name, (_, used) in plain.items() if now - used > IDLE_SECS]:
                del plain[idle]
        counts = Counter(worker for worker, _ in plain.values())
        assert [table.count(worker) for worker in fleet] == [counts[worker] for worker in fleet]
        assert len(table) == len(plain)
        for name in "abcdefg":
            worker, used = plain.get(name, (None, now))
            assert table.find(name, now) is (worker if now - used <= IDLE_SECS else None)
    assert len(plain) <= MOST < DROPPED_PER_SLICE


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 80))
def test_sessions_that_begin_at_once_are_spread_by_weight(weights, count):
    fleet, table = weighted(*weights), OwnSessions()
    table.tune(1000, 0)
    for number in range(count):
        table.keep(f"{number}", fewest_sessions(fleet, table, number), 0.0)
    for worker in fleet:
        share = count * worker.weight / sum(weights)
        assert abs(table.count(worker) - share) <= len(fleet)
