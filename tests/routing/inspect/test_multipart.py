import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.body_fields import (
    MAX_PART_HEAD_BYTES,
    MAX_PARTS,
    MAX_VALUE_BYTES,
    form_fields,
)

TYPE = b"multipart/form-data; boundary=XyZ"
words = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=20)


def part(name: str, value: bytes, *, file: bool = False, more: bytes = b"") -> bytes:
    disposition = f'content-disposition: form-data; name="{name}"' + (
        '; filename="a"' if file else ""
    )
    return b"--XyZ\r\n" + disposition.encode() + b"\r\n" + more + b"\r\n" + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--XyZ--\r\n"


@given(st.binary(), st.binary(max_size=100))
def test_any_body_is_read_without_an_error(body, content_type):
    assert form_fields(body, content_type).keys() <= {"model", "stream"}


@given(
    words,
    st.lists(st.sampled_from([b"--XyZ", b"\r\n", b'name="model"', b"x", b"content-disposition:"])),
)
def test_a_field_before_a_broken_part_is_read(value, pieces):
    body = part("model", value.encode()) + b"--XyZ" + b"".join(pieces)
    assert form_fields(body, TYPE) == {"model": value}


@given(
    st.lists(st.tuples(st.sampled_from(["model", "stream", "file", "other"]), words, st.booleans()))
)
def test_the_first_plain_field_of_each_name_wins(fields):
    body = form(*(part(name, value.encode(), file=file) for name, value, file in fields))
    expected: dict[str, str] = {}
    for name, value, file in fields:
        if name in ("model", "stream") and not file:
            expected.setdefault(name, value)
    assert form_fields(body, TYPE) == expected


@pytest.mark.parametrize(
    "content_type",
    [
        TYPE,
        b'multipart/form-data; boundary="XyZ"',
        b"Multipart/Form-Data; charset=utf-8; BOUNDARY=XyZ",
        b"multipart/form-data;boundary=XyZ; x=y",
    ],
)
def test_a_boundary_is_read_in_every_notation(content_type):
    assert form_fields(form(part("model", b"m")), content_type) == {"model": "m"}


@pytest.mark.parametrize("content_type", [b"", b"multipart/form-data", b"application/json"])
def test_without_a_boundary_there_are_no_fields(content_type):
    assert form_fields(form(part("model", b"m")), content_type) == {}


def test_a_binary_file_before_the_fields_hides_nothing():
    audio = bytes(range(256)) * 40
    body = form(part("file", audio, file=True), part("model", b"whisper"), part("stream", b"true"))
    assert form_fields(body, TYPE) == {"model": "whisper", "stream": "true"}


def test_values_and_heads_are_bounded():
    long_value = part("model", b"m" * (MAX_VALUE_BYTES + 1))
    assert form_fields(form(long_value, part("stream", b"1")), TYPE) == {"stream": "1"}
    long_head = part("model", b"m", more=b"x: " + b"y" * MAX_PART_HEAD_BYTES + b"\r\n")
    assert form_fields(form(long_head), TYPE) == {}


def test_the_number_of_parts_that_are_read_is_bounded():
    fillers = [part("filler", b"")] * (MAX_PARTS - 1)
    assert form_fields(form(*fillers, part("model", b"m")), TYPE) == {"model": "m"}
    assert form_fields(form(*fillers, part("filler", b""), part("model", b"m")), TYPE) == {}


def test_the_complete_fields_of_a_truncated_form_are_read():
    body = (
        part("stream", b"1") + b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhi'
    )
    assert form_fields(body, TYPE) == {"stream": "1"}
