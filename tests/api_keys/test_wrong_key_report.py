from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api_keys.wrong_key_report import PAUSE_SECS, RecentRefusals, WrongKeyReport


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 5)), max_size=40))
def test_each_refused_request_is_in_one_line_and_lines_are_a_minute_apart(steps):
    report, now, refused, lines = WrongKeyReport(), 0.0, 0, []
    for pause, more in steps:
        now, refused = now + pause, refused + more
        if count := report.due(refused, now):
            lines.append((now, count))
    assert all(later[0] - before[0] >= PAUSE_SECS for before, later in pairwise(lines))
    last = report.due(refused, now + PAUSE_SECS)
    assert sum(count for _, count in lines) + last == refused


def test_refusals_of_the_last_minute_are_counted():
    recent = RecentRefusals()
    assert recent.count(3) == 3  # before the first look
    for now, refused in ((10.0, 3), (11.0, 7), (40.0, 7), (70.0, 9)):
        recent.note(refused, now)
    assert (recent.count(9), recent.count(12)) == (6, 9)
    recent.note(12, 500.0)
    recent.note(12, 560.0)
    assert recent.count(12) == 0
