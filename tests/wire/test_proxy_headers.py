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


def test_requests_with_other_hop_ids_or_none_are_accepted():
    reject_loop(request(hop_line(OTHER)), OWN.encode())
    reject_loop(request(), OWN.encode())
    reject_loop(request(hop_line(OTHER)), b"")


def test_a_cached_head_with_the_own_hop_id_is_rejected_too():
    cache = RequestHeadCache(proxy_id=OWN.encode())
    for proxy_id in (OTHER, "c" * 32, "d" * 32) * 3:
        lines = cache.parse(request(hop_line(proxy_id))).lines
        assert hop_line(proxy_id) in lines
    for _ in range(3):
        with pytest.raises(HttpError):
            cache.parse(request(hop_line(OWN)))
        with pytest.raises(HttpError):
            cache.parse(request(hop_line(OTHER) + hop_line(OWN)))
        with pytest.raises(HttpError):
            cache.parse(request(f"x-omni-hop: {OTHER}, {OWN}\r\n".encode()))
