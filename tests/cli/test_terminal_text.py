import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cli.terminal_text import (
    display_width,
    format_age,
    format_millis,
    format_size,
    parse_time,
    printable,
    render_table,
    strip_noise,
    truncate,
    truncate_middle,
)
from tests.cli.feeds import ODD


@given(ODD)
def test_control_characters_are_never_printed(text):
    shown = printable(text)
    assert shown.isprintable() or shown == ""
    assert len(shown.splitlines()) <= 1


def test_an_escape_sequence_is_shown_escaped():
    assert printable("a\x1b[31mb\nc界") == "a\\x1b[31mb\\nc界"
    assert printable("\u202eevil\ud800") == "\\u202eevil\\ud800"


@given(ODD, st.integers(0, 30))
def test_truncated_text_fits_and_text_that_fits_is_unchanged(text, width):
    text = printable(text)
    for function in (truncate, truncate_middle):
        shown = function(text, width)
        assert display_width(shown) <= width
        if display_width(text) <= width:
            assert shown == text


def test_truncating_an_address_keeps_both_ends():
    assert truncate_middle("replica-7.west.example:8000", 17) == "replica-…ple:8000"


@given(st.lists(st.tuples(ODD, ODD, st.integers()), max_size=5))
def test_every_row_of_a_table_is_one_line_and_columns_are_aligned(rows):
    lines = render_table(("A", "B", "NUMBER"), rows, ["NUMBER"])
    assert len(lines) == len(rows) + 1
    ends = {display_width(line) for line in lines}
    assert len(ends) == 1  # the last column is flush right


@pytest.mark.parametrize(
    ("secs", "expected"),
    [
        (0, "0 s"), (-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"),
        (3660, "1 h 1 min"), (86400, "1 d"), (100_000, "1 d 3 h"), (math.inf, "-"), (math.nan, "-"),
    ],
)  # fmt: skip
def test_ages_have_at_most_two_units(secs, expected):
    assert format_age(secs) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"), (0.04, "0.0 ms"), (9.94, "9.9 ms"), (10, "10 ms"), (999, "999 ms"),
        (1000, "1.0 s"), (99_999, "100.0 s"), (120_000, "2 min"), (math.nan, "-"),
    ],
)  # fmt: skip
def test_times_are_short(value, expected):
    assert format_millis(value) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_416_512, "3.4 MB"), (9_960_000, "10 MB"),
        (999_600_000, "1.0 GB"), (12e9, "12 GB"), (4e12, "4000 GB"),
    ],
)  # fmt: skip
def test_sizes_are_short(nbytes, expected):
    assert format_size(nbytes) == expected


def test_a_time_without_a_zone_is_not_parsed():
    assert parse_time("2026-11-21T19:00:00+00:00").hour == 19
    assert parse_time("2026-11-21T19:00:00") is None
    assert parse_time("x") is None
    assert parse_time(None) is None


def test_noise_is_removed_from_reasons():
    reason = "[Errno 111] Error connecting to ('127.0.0.1', 1): Connection refused"
    assert strip_noise(reason) == "Connection refused"
    assert strip_noise("[Errno -2] Name unknown") == "Name unknown"
    assert strip_noise("status 500") == "status 500"
