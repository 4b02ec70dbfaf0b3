import pytest

from omni_proxy.routing.inspect.requirements import MAX_KEY_BYTES, affinity_key_of

ALL = [
    b"X-SMG-Routing-Key: routing",
    b"X-Session-Id: session",
    b"Authorization: Bearer abc",
    b"X-Forwarded-For: 10.0.0.1",
    b"Cookie: a=b",
]


def head(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in lines)


@pytest.mark.parametrize("number", range(len(ALL)))
def test_the_first_in_the_order_of_preference_is_the_key(number):
    value = ALL[number].partition(b": ")[2].decode()
    assert affinity_key_of(head(b"Accept: */*", *reversed(ALL[number:]))) == value


def test_names_are_found_in_any_case_and_values_without_their_padding():
    assert affinity_key_of(head(b"x-smg-ROUTING-key: \t me \t")) == "me"
    assert affinity_key_of(head(b"x-session-id:me")) == "me"


def test_an_empty_value_is_no_key():
    assert affinity_key_of(head(b"X-Session-Id:  ", b"Cookie: c")) == "c"


def test_no_key_is_an_empty_one():
    assert affinity_key_of(b"") == ""
    assert (
        affinity_key_of(head(b"Host: cookie: no", b"X-Cookie: no", b"Accept: authorization: x"))
        == ""
    )


def test_the_first_line_of_a_name_wins():
    assert affinity_key_of(head(b"X-Session-Id: one", b"X-Session-Id: two")) == "one"


def test_long_values_become_short_and_stay_apart():
    keys = {affinity_key_of(head(b"Cookie: " + b"c" * length)) for length in range(256, 300)}
    assert len(keys) == 44
    assert max(map(len, keys)) == MAX_KEY_BYTES
    assert len(affinity_key_of(head(b"Cookie: " + b"c" * 2**20))) == 32


def test_bytes_of_any_kind_are_a_key():
    assert affinity_key_of(head(b"X-Session-Id: \xff\x00\xe9")) == "\xff\x00\xe9"


def test_a_megabyte_of_other_lines_is_read_over():
    assert affinity_key_of(head(*[b"X-Filler: " + b"cookie:" * 10] * 13_000, b"Cookie: c")) == "c"
