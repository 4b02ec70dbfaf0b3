"""The store's scripts with invalid values in the store."""

from omni_proxy.cluster.operation_lease import READ, READ_MEMBERS, RESTORE
from omni_proxy.cluster.worker_changes import PUT
from omni_proxy.cluster_member.store_connection import connected
from omni_proxy.cluster_member.weight_state import WeightState, decode_state, encode_state
from omni_proxy.config.tables.cluster import store_address
from tests.redis_server import needs_store, redis_server

pytestmark = needs_store


async def test_an_invalid_value_is_overwritten():
    state = WeightState(fencing_token=5, number=1, holder="one")
    restore = ("EVAL", RESTORE, 2, "token", "state", 5, 1, encode_state(state))
    async with redis_server() as server:
        address = store_address(server.url)
        async with connected(address, lambda *_: None, None, 10.0) as connection:
            too_high = encode_state(WeightState(fencing_token=2**64 - 1))
            for poison in (b"\xc1", b"\x80", b"\x01", b"x", b"\x81\xa5token\xa1x", too_high):
                token = 2**64 - 1 if poison is too_high else "abc"
                await connection.call(("SET", "state", poison), ("SET", "token", token))
                assert await connection.call(restore) == [1]
                stored, token = await connection.call(("GET", "state"), ("GET", "token"))
                assert decode_state(stored) == state
                assert token == b"5"
            for poison in (b"abc", b"", b"12", b":x", b"%d:x" % (2**64 - 1)):
                await connection.call(("HSET", "workers", "http://a:1", poison))
                put = ("EVAL", PUT, 1, "workers", "http://a:1", 3, "new", "channel", "message")
                assert await connection.call(put) == [1]
                assert await connection.call(("HGET", "workers", "http://a:1")) == [b"3:new"]


async def test_a_lease_without_expiry_gets_one():
    async with redis_server() as server:
        address = store_address(server.url)
        async with connected(address, lambda *_: None, None, 10.0) as connection:
            await connection.call(("SET", "lease", "7:one"), ("SET", "member", ""))
            assert await connection.call(("EVAL", READ, 1, "lease", 50)) == [b"7:one"]
            assert await connection.call(("EVAL", READ_MEMBERS, 1, "member", 50)) == [[1]]
            remaining_ms = await connection.call(("PTTL", "lease"), ("PTTL", "member"))
            assert all(ms == -2 or 0 <= ms <= 50 for ms in remaining_ms)
