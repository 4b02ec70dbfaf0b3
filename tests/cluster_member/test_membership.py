"""Calls between members: a member answers only calls of its cluster that are addressed to it."""

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from omni_proxy.cluster_member.membership import (
    CallError,
    CallHandler,
    Members,
    read_message,
    signed,
)

KEY = b"k" * 32


class Store:
    """A store in memory with the commands that members use."""

    def __init__(self) -> None:
        self.key = None
        self.reads = 0
        self.leases: dict[bytes, bytes] = {}
        self.addresses: dict[bytes, bytes] = {}

    async def call(self, *commands):
        replies = []
        for name, *arguments in commands:
            match name:
                case "SET" if arguments[-1] == "NX":
                    self.key = self.key or arguments[1]
                    replies.append(None)
                case "GET":
                    replies.append(self.key)
                case "SMEMBERS":
                    replies.append(list(self.leases))
                case "HGETALL":
                    self.reads += 1
                    replies.append(dict(self.addresses))
                case "EVAL":
                    names = [key.rpartition(":")[2].encode() for key in arguments[2:-1]]
                    replies.append([self.leases[member] is not None for member in names])
                case "SREM" | "HDEL":
                    for member in arguments[1:]:
                        self.leases.pop(member.encode(), None)
                        self.addresses.pop(member.encode(), None) if name == "HDEL" else None
                    replies.append(1)
        return replies

    async def send(self, *commands):
        await self.call(*commands)


class Member:
    def __init__(self, name):
        self.name, self.outgoing, self.applied, self.replies = name, None, [], []
        handler = CallHandler(lambda: self.outgoing, self._apply, self.replies.append)
        self.members = Members(lambda: (self.name, "omni"), lambda: 1000, handler)

    async def _apply(self, message):
        self.applied.append(message)
        return [b"applied by " + self.name.encode()]

    def join(self, store, *, live):
        for name, *arguments in self.members.registration():
            if name == "HSET":
                store.addresses[self.name.encode()] = arguments[2].encode()
        store.leases[self.name.encode()] = b"" if live else None


@asynccontextmanager
async def two_members(monkeypatch, *, live=False):
    monkeypatch.setattr("omni_proxy.cluster_member.membership.POLL_SECS", 0.01)
    store, one, two = Store(), Member("one"), Member("two")
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        await nursery.start(two.members.listen, "127.0.0.1", scope)
        await two.members.connect(store)
        two.join(store, live=live)
        two.members.disconnect()  # from the store
        await one.members.connect(store)
        nursery.start_soon(one.members.run)
        yield store, one, two, scope
        nursery.cancel_scope.cancel()


async def wait_until(holds):
    with trio.fail_after(20):
        while not holds():  # noqa: ASYNC110  the members run in other tasks
            await trio.sleep(0.01)


async def wait_until_needed(member, expected):
    with trio.fail_after(20):
        while await member.members.needed() != expected:  # noqa: ASYNC110  as above
            await trio.sleep(0.01)


async def test_a_member_without_a_lease_is_called_repeatedly(monkeypatch):
    async with two_members(monkeypatch) as (_, one, two, _):
        assert await one.members.needed() == {"two"}
        one.outgoing = b"hold"
        await wait_until(lambda: len(one.replies) > 1)
        assert set(two.applied) == {b"hold"}
        assert set(one.replies) == {b"applied by two"}
        assert await one.members.needed() == {"two"}


async def test_a_member_with_a_lease_is_not_called(monkeypatch):
    async with two_members(monkeypatch, live=True) as (store, one, two, _):
        one.outgoing = b"hold"
        reads = store.reads
        await wait_until(lambda: store.reads > reads + 3)
        assert await one.members.needed() == {"two"}
        assert two.applied == []


async def test_a_member_without_a_listener_is_removed(monkeypatch):
    async with two_members(monkeypatch) as (store, one, _, listening):
        listening.cancel()
        one.outgoing = b"hold"
        await wait_until_needed(one, set())
        assert store.addresses == {}


async def test_another_member_at_the_address_applies_nothing(monkeypatch):
    async with two_members(monkeypatch) as (_, one, two, _):
        two.name = "three"  # a new process at the same address
        one.outgoing = b"hold"
        await wait_until_needed(one, set())
        assert two.applied == []


async def test_a_member_that_cannot_reply_is_not_needed_for_this_operation(monkeypatch):
    async with two_members(monkeypatch) as (_, one, two, _):
        two.members._key = b"another cluster"
        one.outgoing = b"hold"
        await wait_until_needed(one, set())
        assert two.applied == []
        one.outgoing = None
        await wait_until_needed(one, {"two"})


async def test_members_remember_each_other_when_the_store_has_lost_its_data(monkeypatch):
    async with two_members(monkeypatch) as (store, one, _, _):
        store.addresses.clear()
        store.leases.clear()
        assert await one.members.needed() == {"two"}
        one.members.forget("two")  # it has left the cluster
        assert await one.members.needed() == set()


async def test_invalid_members_in_the_store_are_ignored(monkeypatch):
    async with two_members(monkeypatch, live=True) as (store, one, _, _):
        store.leases[b"\xff\xfe"] = b""
        for name, address in (
            (b"\xff", b"127.0.0.1 1"), (b"a", b"\xff 1"), (b"b", b"127.0.0.1 x"), (b"c", b""),
            (b"d", b"127.0.0.1 99999"), (b"e", b"127.0.0.1 0"),
        ):  # fmt: skip
            store.addresses[name] = address
        assert await one.members.needed() == {"two"}


@pytest.mark.parametrize(
    "change", [lambda sent: sent[:-1] + b"x", lambda sent: sent[:20], lambda _: b"\xff" * 40]
)
async def test_a_message_that_is_truncated_or_has_a_wrong_signature_is_refused(change):
    left, right = trio.testing.memory_stream_pair()
    await left.send_all(change(signed(b"payload", KEY)))
    await left.send_eof()
    with pytest.raises(CallError):
        await read_message(right, KEY)


async def test_a_reply_to_another_call_is_refused():
    left, right = trio.testing.memory_stream_pair()
    await left.send_all(signed(b"payload", KEY, b"another call"))
    with pytest.raises(CallError):
        await read_message(right, KEY, b"this call")
