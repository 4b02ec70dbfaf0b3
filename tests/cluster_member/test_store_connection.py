"""The connection to a real store: batches, published messages, and how it ends."""

import re
import ssl
from contextlib import asynccontextmanager

import pytest
import trio

from omni_proxy.cluster_member.store_connection import StoreError, StoreRefused, connected
from omni_proxy.config.tables.cluster import store_address
from tests.promises.support.tls_helpers import FILES, client_context
from tests.redis_server import needs_store, redis_server

pytestmark = needs_store

TIMEOUT_SECS = 30


def ignore(channel, payload):
    pass


@asynccontextmanager
async def store(on_message=ignore, timeout_secs=TIMEOUT_SECS):
    async with (
        redis_server() as server,
        connected(store_address(server.url), on_message, None, timeout_secs) as connection,
    ):
        yield server, connection


async def test_replies_come_in_the_order_of_the_commands():
    async with store() as (_, connection):
        replies = await connection.call(("SET", "a", b"\x00\r\n"), ("GET", "a"), ("GET", "none"))
        assert replies == [b"OK", b"\x00\r\n", None]


async def test_messages_arrive_between_replies():
    received = []
    async with store(lambda channel, payload: received.append((channel, payload))) as (
        _,
        connection,
    ):
        await connection.call(("SUBSCRIBE", "c"))
        await connection.call(("PUBLISH", "c", b"1"), ("GET", "a"), ("PUBLISH", "c", b"2"))
        assert received == [(b"c", b"1"), (b"c", b"2")]


async def test_replies_to_a_cancelled_call_reach_no_other_caller():
    async with store() as (server, connection):
        server.pause()
        with trio.move_on_after(0.05):
            await connection.call(("SET", "a", "late"))
        server.resume()
        assert await connection.call(("GET", "a")) == [b"late"]


async def test_late_replies_are_an_error():
    async with store(timeout_secs=0.05) as (server, connection):
        server.pause()
        with pytest.raises(StoreError, match=r"no reply for 0\.05 s"):
            await connection.call(("GET", "a"))
        server.resume()


async def test_an_error_reply_is_raised_and_the_connection_stays_open():
    async with store() as (_, connection):
        with pytest.raises(StoreRefused) as caught:
            await connection.call(("NO-SUCH-COMMAND",), ("SET", "a", "1"))
        assert caught.value.code == "ERR"
        assert await connection.call(("GET", "a")) == [b"1"]


async def test_a_wrong_password_is_an_error():
    async with redis_server("--requirepass", "right") as server:
        address = store_address(server.url)
        async with connected(
            address._replace(password="right"), ignore, None, TIMEOUT_SECS
        ) as connection:
            assert await connection.call(("PING",)) == [b"PONG"]
        with pytest.RaisesGroup(pytest.RaisesExc(StoreRefused, match="WRONGPASS")):
            async with connected(address._replace(password="wrong"), ignore, None, TIMEOUT_SECS):
                pass


async def test_the_end_of_the_store_ends_the_connection():
    with pytest.RaisesGroup(StoreError):
        async with store() as (server, _):
            server.kill()
            await trio.sleep_forever()


async def test_a_store_that_is_down_is_an_error():
    async with redis_server() as server:
        server.kill()
        with pytest.raises(StoreError, match="can't be reached"):
            async with connected(store_address(server.url), ignore, None, TIMEOUT_SECS):
                pass


async def test_over_tls_the_certificate_is_compared_with_the_address():
    async with redis_server("--requirepass", "right", tls=True) as server:
        address = store_address(server.url)._replace(password="right")
        assert address.tls
        async with connected(address, ignore, client_context(), TIMEOUT_SECS) as connection:
            big = b"x" * 300_000  # more than one record of TLS
            assert await connection.call(("SET", "a", big), ("GET", "a")) == [b"OK", big]
        await assert_refused(
            address, ssl.create_default_context(), "unable to get local issuer|self.signed"
        )
        await assert_refused(address, None, "closed the connection|broke")
    certificate = ("--tls-cert-file", str(FILES / "elsewhere.pem"))
    key = ("--tls-key-file", str(FILES / "elsewhere-key.pem"))
    async with redis_server(*certificate, *key, tls=True) as server:
        await assert_refused(
            store_address(server.url), client_context(), "certificate is not valid for '127.0.0.1'"
        )


async def assert_refused(address, context, reason):
    """Asserts that no connection can be made, for this reason."""
    with pytest.raises((StoreError, ExceptionGroup)) as caught:
        async with connected(address, ignore, context, TIMEOUT_SECS):
            pass
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert re.search(reason, str(error)), error


async def test_a_user_with_acl_rules_can_log_in_and_is_refused_other_keys():
    rules = ("--user", "proxy", "on", ">right", "~omni:*", "&omni:*", "+@all")
    async with redis_server(*rules) as server:
        address = store_address(server.url)._replace(user="proxy", password="right")
        async with connected(address, ignore, None, TIMEOUT_SECS) as connection:
            assert await connection.call(("SET", "omni:a", "1")) == [b"OK"]
            with pytest.raises(StoreRefused, match="NOPERM") as caught:
                await connection.call(("SET", "another", "1"))
            assert caught.value.code == "NOPERM"
