from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.api_keys.rate_window import WINDOW_CELLS, RateWindow
from tests.example_counts import examples

# Steps of a client: seconds since the previous step, and the amount that it requests.
STEPS = st.lists(
    st.tuples(
        st.floats(0, 90).map(lambda secs: round(secs, 3)) | st.just(0.0) | st.just(0.5),
        st.integers(1, 12),
    ),
    max_size=60,
)
START = 1000.0


def window():
    return RateWindow([0] * WINDOW_CELLS)


def shared(count):
    rows = [[0] * WINDOW_CELLS for _ in range(count)]
    windows = [RateWindow(row) for row in rows]
    for index, each in enumerate(windows):
        each.share_with([row for at, row in enumerate(rows) if at != index], lambda: None)
    return windows


class Log:
    """A naive model: each amount with its time."""

    def __init__(self):
        self.entries = []

    def within(self, secs, now):
        return sum(amount for at, amount in self.entries if at >= now - secs)


def play(steps, limit, choose):
    """`choose(i)`: the window that step `i` uses."""
    log, now = Log(), START
    for index, (pause, amount) in enumerate(steps):
        now += pause
        if choose(index).take(amount, limit, now):
            log.entries.append((now, amount))
            assert log.within(60, now) <= limit
        else:
            assert log.within(60.5, now) + amount > limit
    return log


@given(STEPS, st.integers(1, 30))
def test_no_minute_exceeds_the_limit_and_none_is_refused_below_it(steps, limit):
    one = window()
    play(steps, limit, lambda _index: one)


@given(STEPS, st.integers(1, 30), st.integers(2, 3))
def test_processes_that_share_a_window_keep_its_limit_together(steps, limit, count):
    windows = shared(count)
    play(steps, limit, lambda index: windows[index * 7 % 5 % count])


@given(STEPS, st.integers(1, 30))
def test_the_used_amount_is_that_of_the_last_minute(steps, limit):
    one = window()
    log = play(steps, limit, lambda _index: one)
    now = START + sum(pause for pause, _ in steps)
    assert log.within(60, now) <= one.used(now) <= log.within(60.5, now)


@given(STEPS, st.integers(12, 30))
def test_the_reported_wait_is_sufficient_and_at_most_a_second_too_long(steps, limit):
    one = window()
    play(steps, limit, lambda _index: one)
    now = START + sum(pause for pause, _ in steps)
    if one.take(12, limit, now):
        return
    wait = one.wait_secs(12, limit, now)
    assert one.used(now + wait) + 12 <= limit
    if wait > 1:
        other = window()
        play(steps, limit, lambda _index: other)
        assert other.used(now + wait - 1.01) + 12 > limit


def test_a_constantly_requesting_client_gets_its_rate_within_two_percent():
    one, granted = window(), 0
    for tick in range(60 * 60 * 10):  # an hour, ten requests a second
        granted += one.take(1, 100, START + tick / 10)
    assert 0.98 * 100 * 60 <= granted <= 100 * 61


def test_a_burst_of_the_whole_limit_is_free_again_after_a_minute_and_not_before():
    one = window()
    assert [one.take(1, 5, START + 0.1) for _ in range(6)] == [True] * 5 + [False]
    assert not one.take(1, 5, START + 60.1)
    assert one.wait_secs(1, 5, START + 0.1) == 61
    assert one.take(1, 5, START + 60.6)


def test_unused_tokens_are_returned_at_once():
    one = window()
    assert one.take(10, 10, START)
    one.settle(10, one.bucket, 3, START + 5)
    assert one.used(START + 5) == 3
    assert one.take(7, 10, START + 5)


def test_tokens_beyond_the_reserved_ones_are_a_debt_of_later_requests():
    one = window()
    assert one.take(2, 10, START)
    bucket = one.bucket
    one.settle(2, bucket, 25, START + 30)
    assert one.used(START + 30) == 25
    assert not one.take(1, 10, START + 89)
    assert one.take(1, 10, START + 91)


def test_tokens_of_an_expired_bucket_are_not_returned_twice():
    one = window()
    assert one.take(10, 10, START)
    bucket = one.bucket
    one.settle(10, bucket, 0, START + 200)
    assert one.used(START + 200) == 0
    assert one.take(10, 10, START + 200)
    assert not one.take(1, 10, START + 200)


def test_a_process_that_takes_over_a_row_continues_its_counts():
    row = [0] * WINDOW_CELLS
    assert RateWindow(row).take(4, 5, START)
    again = RateWindow(row)
    assert not again.take(2, 5, START + 1)
    assert again.take(1, 5, START + 1)


def test_a_row_that_is_idle_for_a_minute_no_longer_counts():
    first, second = shared(2)
    assert first.take(5, 5, START)
    assert not second.take(1, 5, START + 59)
    assert second.take(5, 5, START + 61)
    assert second.take(5, 5, START + 500)
    assert second.used(START + 500) == 5


def test_two_processes_that_count_concurrently_keep_the_limit():
    rows = [[0] * WINDOW_CELLS for _ in range(2)]
    first, second = RateWindow(rows[0]), RateWindow(rows[1])
    second.share_with([rows[0]], lambda: None)
    taken = []
    first.take(0, 9, START)  # creates the present bucket

    def meanwhile():  # the other process counts between this one's write and its read
        if not taken:
            taken.append(second.take(3, 4, START))

    first.share_with([rows[1]], meanwhile)
    taken.append(first.take(3, 4, START))
    assert len(taken) == 2
    assert taken.count(True) <= 1
    assert first.used(START) <= 4


def test_a_process_with_an_old_clock_counts_in_the_newest_bucket():
    first, second = shared(2)
    assert first.take(2, 5, START + 30)
    assert second.take(2, 5, START)  # its event-loop turn began half a minute ago
    assert first.used(START + 30) == 4
    assert not first.take(2, 5, START + 89)


@settings(max_examples=examples(60))
@given(STEPS, STEPS, st.integers(1, 30), st.integers(1, 2))
def test_a_successor_continues_the_counts(steps, later, limit, count):
    windows = shared(count)
    play(steps, limit, lambda index: windows[index % count])
    now = START + sum(pause for pause, _ in steps) + 1
    new, old = window(), windows[0]
    new.restore(old.rows(now), now)
    assert new.used(now) == old.used(now)
    for pause, amount in later:
        now += pause
        assert new.take(amount, limit, now) == old.take(amount, limit, now)


def test_expired_or_future_counts_are_not_restored():
    new = window()
    new.restore([(0, 5), (1999, 3), (2000, 2), (2001, 7), (1998, -4)], 1000.0)
    assert new.used(1000.0) == 5
