"""The syntax of faults."""

import pytest

from omni_proxy.simulate.faults import Fault, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("die:3@12.5", Fault("die", 12.5, 3)),
        ("slow:0@10x4", Fault("slow", 10.0, 0, 4.0)),
        ("slow:0@10x0.5", Fault("slow", 10.0, 0, 0.5)),
        ("join@60", Fault("join", 60.0)),
        ("evict:1@30", Fault("evict", 30.0, 1)),
        ("lose_events:0.1", Fault("lose_events", 0.0, share=0.1)),
    ],
)
def test_a_fault_is_parsed(text, fault):
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("die:3", "expected die:W@SECS"),
        ("explode:1@3", "expected die:W@SECS"),
        ("slow:0@10x0", "above 0"),
        ("join:2@3", "expected"),
        ("lose_events:1.1", "from 0 to 1"),
        ("lose_events:x", "or lose_events:SHARE"),
    ],
)
def test_an_invalid_fault_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_fault(text)
