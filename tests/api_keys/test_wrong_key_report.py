from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api_keys.wrong_key_report import PAUSE_SECS, WrongKeyReport


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 5)), max_size=40))
def test_each_refused_request_is_in_one_line_and_lines_are_a_minute_apart(steps):
    report, now, refused, lines = WrongKeyReport(), 0.0, 0, []
    for pause, more in steps:
        now, refused = now + pause, refused + more
        if count := report.due(refused, now):
            lines.append((now, count))
    assert all(later[0] - before[0] >= PAUSE_SECS for before, later in pairwise(lines))
    last = report.due(refused, now + PAUSE_SECS)
    assert sum(count for _, count in lines) + last == refused
