import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.websocket import MAX_EVENT_BYTES, SpeechEvents, is_application_code


def flags_after(*messages):
    events = SpeechEvents()
    for message in messages:
        events.feed(message, finished=True)
    return events.done, events.error, events.failed_audio


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('{"type":"session.done","total_sentences":1}', (True, False, False)),
        ('{"type":"error","message":"x"}', (False, True, False)),
        ('{"type":"audio.done","error":true}', (False, False, True)),
        ('{"type":"audio.done","error":false}', (False, False, False)),
        ('{"type":"audio.done"}', (False, False, False)),
        ('{"type":"session.configured","error":true}', (False, False, False)),
        ('{"type":["session.done"]}', (False, False, False)),
        ("session.done", (False, False, False)),
        ("[]", (False, False, False)),
        ("", (False, False, False)),
    ],
)
def test_the_flags_after_each_event(message, expected):
    assert flags_after(message) == expected


def test_a_split_event_is_read_at_its_end():
    events = SpeechEvents()
    for letter in '{"type":"session.done"}':
        events.feed(letter, finished=False)
    assert not events.done
    events.feed("", finished=True)
    assert events.done


def test_an_oversized_message_is_skipped_and_the_next_is_read():
    events = SpeechEvents()
    events.feed('{"type":"error","x":"' + "a" * MAX_EVENT_BYTES, finished=False)
    events.feed('"}', finished=True)
    assert not events.error
    events.feed('{"type":"error"}', finished=True)
    assert events.error


@given(st.text(max_size=50))
def test_after_arbitrary_text_the_next_event_is_read(text):
    done, _, _ = flags_after(text, '{"type":"session.done"}')
    assert done


def test_the_close_codes_of_the_application():
    application_codes = {1002, 1003, 1007, 1008, 1009, 1010, 1013, *range(3000, 5000)}
    assert {code for code in range(6000) if is_application_code(code)} == application_codes
