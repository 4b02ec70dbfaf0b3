import pytest

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import hop_line, reject_loop
from omni_proxy.wire.head_caching.request_heads import RequestHeadCache
from tests.wire.heads import request

OWN, OTHER = "a" * 32, "b" * 32


def test_a_request_with_the_own_hop_id_is_508():
    with pytest.raises(HttpError) as refused:
        reject_loop(request(hop_line(OWN)), OWN.encode())
    assert (refused.value.status, refused.value.code) == (508, "loop_detected")
    assert refused.value.close


def test_marks_of_others_and_none_are_let_pass():
    reject_loop(request(hop_line(OTHER)), OWN.encode())
    reject_loop(request(), OWN.encode())
    reject_loop(request(hop_line(OTHER)), b"")


def test_a_head_that_is_known_but_for_the_mark_is_refused_as_well():
    templates = RequestHeadCache(proxy_id=OWN.encode())
    for mark in (OTHER, "c" * 32, "d" * 32) * 3:
        lines = templates.parse(request(hop_line(mark))).lines
        assert hop_line(mark) in lines
    for _ in range(3):
        with pytest.raises(HttpError):
            templates.parse(request(hop_line(OWN)))
        with pytest.raises(HttpError):
            templates.parse(request(hop_line(OTHER) + hop_line(OWN)))
        with pytest.raises(HttpError):
            templates.parse(request(f"x-omni-hop: {OTHER}, {OWN}\r\n".encode()))
