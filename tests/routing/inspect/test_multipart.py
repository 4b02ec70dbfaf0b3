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
    named = f'content-disposition: form-data; name="{name}"' + ('; filename="a"' if file else "")
    return b"--XyZ\r\n" + named.encode() + b"\r\n" + more + b"\r\n" + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--XyZ--\r\n"


@given(st.binary(), st.binary(max_size=100))
def test_no_body_makes_it_raise(body, content_type):
    assert form_fields(body, content_type).keys() <= {"model", "stream"}


@given(
    st.lists(st.sampled_from([b"--XyZ", b"\r\n", b'name="model"', b"x", b"content-disposition:"]))
)
def test_no_broken_form_makes_it_raise(pieces):
    form_fields(b"".join(pieces), TYPE)


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
def test_a_boundary_is_found_in_each_spelling(content_type):
    assert form_fields(form(part("model", b"m")), content_type) == {"model": "m"}


@pytest.mark.parametrize("content_type", [b"", b"multipart/form-data", b"application/json"])
def test_without_a_boundary_there_are_no_facts(content_type):
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


def test_only_so_many_parts_are_looked_at():
    fillers = [part("filler", b"")] * (MAX_PARTS - 1)
    assert form_fields(form(*fillers, part("model", b"m")), TYPE) == {"model": "m"}
    assert form_fields(form(*fillers, part("filler", b""), part("model", b"m")), TYPE) == {}


def test_a_truncated_form_reports_its_complete_fields():
    body = (
        part("stream", b"1") + b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhi'
    )
    assert form_fields(body, TYPE) == {"stream": "1"}
