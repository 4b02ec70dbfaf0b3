"""Publishes the block events of a prefix cache over ZeroMQ, and replays the last batches.

    PUB     [topic, number, payload], the number in 8 bytes, from 0
    ROUTER  request ["", first number]; replies with the batches from there on, then with number -1
    payload [unix seconds, [event ...], rank] as MessagePack; vLLM: an event is a map with its
            `type`, hashes unsigned; SGLang: an array that begins with its type, hashes signed
A block's hash covers its tokens and all before it. Invariants: a block is in `held` while at least
one cache entry has all of its tokens; `publish` never blocks, and a dropped batch leaves a gap in
the numbers. The sockets belong to a thread once it runs. After `close` the ports are free.
Source: note:real-engines 4, note:features 7.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec
import zmq

from omni_proxy.replica.kv_events.publisher_settings import (
    WILDCARD,
    Form,
    KvEventSettings,
    bind_address,
    binds,
    stage_information,
    tcp_parts,
)

log = logging.getLogger(__name__)

HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks, each the parent of the next; `parent` is None if the run starts a text.

    `tokens` are the tokens of the whole run, `block_size` for each hash.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Removed blocks, last blocks of a text first, so that no block ever lacks its parent."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    pass


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared


def block_hashes(tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """The hashes of the complete blocks of a text, unsigned numbers of 64 bits."""
    parent = b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = array("q", tokens[end - block_size : end]).tobytes()
        parent = blake2b(block, digest_size=HASH_BYTES, key=parent).digest()
        yield int.from_bytes(parent, "big")


class HeldBlocks:
    """The blocks of one cache's entries. Equal hashes mean equal prefixes, in every replica and
    after a restart."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[tuple[int, ...], tuple[int, ...]] = {}  # by the tokens of an entry
        self._holders: Counter[int] = Counter()  # how many entries hold a block

    @property
    def held(self) -> set[int]:
        return set(self._holders)

    def change(
        self, added: tuple[int, ...], dropped: Iterable[tuple[int, ...]]
    ) -> list[BlockEvent]:
        """Handle that one entry was stored and others evicted for it; returns removals first."""
        chain = tuple(block_hashes(added, self._block_size))
        known = next(
            (index for index, block_hash in enumerate(chain) if not self._holders[block_hash]),
            len(chain),
        )
        self._chains[added] = chain
        self._holders.update(chain)
        gone: list[int] = []
        for tokens in dropped:
            gone += self._release(self._chains.pop(tokens))
        events: list[BlockEvent] = [BlocksRemoved(tuple(gone))] if gone else []
        if known < len(chain):
            new = added[known * self._block_size : len(chain) * self._block_size]
            events.append(BlocksStored(chain[known:], chain[known - 1] if known else None, new))
        return events

    def clear(self) -> list[BlockEvent]:
        self._chains.clear()
        self._holders.clear()
        return [AllCleared()]

    def _release(self, chain: tuple[int, ...]) -> Iterator[int]:
        for block_hash in reversed(chain):
            self._holders[block_hash] -= 1
            if not self._holders[block_hash]:
                del self._holders[block_hash]
                yield block_hash


END: Final = (-1).to_bytes(8, "big", signed=True)
NUMBER_BYTES: Final = 8
REPLAY_BYTES: Final = 64 * 2**20  # of payloads; a batch of a long text is large
REQUEST_BYTES: Final = 64 * 2**10  # the longest message that is accepted
LINGER_MS: Final = 200  # for sending batches that were published just before the end
CLOSE_SECS: Final = 2.0
MEDIUM: Final = "GPU"  # vLLM's name of the first tier of a cache, also on a CPU
RANK: Final = 0
_encoder = msgspec.msgpack.Encoder()


def encode_batch(form: Form, block_size: int, unix_secs: float, events: list[BlockEvent]) -> bytes:
    """Fields for features that this engine lacks (adapters, salts, other attention) are empty."""
    convert = _vllm_events if form == "vllm" else _sglang_events
    return _encoder.encode([unix_secs, list(convert(events, block_size)), RANK])


def _vllm_events(events: Iterable[BlockEvent], block_size: int) -> Iterator[dict[str, Any]]:
    for event in events:
        match event:
            case BlocksStored(hashes, parent, tokens):
                yield {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": parent,
                    "token_ids": tokens,
                    "block_size": block_size,
                    "lora_id": None,
                    "medium": MEDIUM,
                    "lora_name": None,
                    "extra_keys": [None] * len(hashes),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            case BlocksRemoved(hashes):
                for block_hash in hashes:
                    yield {
                        "type": "BlockRemoved",
                        "block_hashes": [block_hash],
                        "medium": MEDIUM,
                        "group_idx": 0,
                    }
            case _:
                yield {"type": "AllBlocksCleared"}


def _sglang_events(events: Iterable[BlockEvent], block_size: int) -> Iterator[list[Any]]:
    for event in events:
        match event:
            case BlocksStored(hashes, parent, tokens):
                above = None if parent is None else _signed(parent)
                for number, block_hash in enumerate(hashes):
                    own = tokens[number * block_size : (number + 1) * block_size]
                    signed = _signed(block_hash)
                    yield ["BlockStored", [signed], above, own, block_size, None, MEDIUM]
                    above = signed
            case BlocksRemoved(hashes):
                for block_hash in hashes:
                    yield ["BlockRemoved", [_signed(block_hash)], MEDIUM]
            case _:
                yield ["AllBlocksCleared"]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class ReplayBuffer:
    """The last batches, bounded in number and in bytes."""

    def __init__(self, max_batches: int, max_bytes: int = REPLAY_BYTES) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._nbytes = 0

    def add(self, number: int, payload: bytes) -> None:
        self._batches.append((number, payload))
        self._nbytes += len(payload)
        while len(self._batches) > self._max_batches or self._nbytes > self._max_bytes:
            self._nbytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        return (batch for batch in self._batches if batch[0] >= number)


class KvEventPublisher:
    """Owns the sockets and the thread; raises OSError if an endpoint cannot be opened.

    `endpoint` and `replay_endpoint` are for subscribers: with the bound port, and with `*` in place
    of the replica's address. Only one thread may call `publish`.
    """

    def __init__(self, settings: KvEventSettings, now: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._now = now
        self._next = 0
        self._dropped = 0
        self._waiting: deque[tuple[int, float, list[BlockEvent]]] = deque()
        self._buffer = ReplayBuffer(settings.buffer_steps)
        self._topic = settings.topic.encode()
        self._closing = False
        self._stopped = False  # the thread has ended, by `close` or by an error
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._socket(zmq.PUB, settings.hwm)
            self.endpoint = self._open(self._pub, settings.endpoint, "endpoint")
            self.replay_endpoint = ""
            if settings.replay_endpoint:
                self._replay = self._socket(zmq.ROUTER, settings.buffer_steps + 2)
                self.replay_endpoint = self._open(
                    self._replay, settings.replay_endpoint, "replay_endpoint"
                )
        except BaseException:
            self._context.destroy(0)
            raise
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def information(self) -> dict[str, Any]:
        """The endpoints, for the stage's static information."""
        return stage_information(self.settings, self.endpoint, self.replay_endpoint)

    def publish(self, events: list[BlockEvent]) -> None:
        """Queue one batch for sending; it is dropped if the queue is full."""
        if self._closing or self._stopped or not events:
            return
        number, self._next = self._next, self._next + 1
        if len(self._waiting) >= self.settings.max_queue_size:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("kv_events_dropped queue=%d", self.settings.max_queue_size)
            return
        self._waiting.append((number, self._now(), events))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send the queued batches and close the sockets; idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_SECS)
        os.close(self._wake)

    def _socket(self, kind: int, send_limit: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, send_limit)
        opened.setsockopt(zmq.LINGER, LINGER_MS)
        opened.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        return opened

    def _open(self, opened: zmq.Socket[bytes], endpoint: str, name: str) -> str:
        """Raises OSError that names the endpoint."""
        try:
            if name == "endpoint" and not binds(endpoint):
                opened.setsockopt(zmq.IPV6, "[" in endpoint)
                opened.connect(endpoint)
                return endpoint
            host = self.settings.host
            address = bind_address(endpoint, _numeric(host) if WILDCARD in endpoint else host)
            opened.setsockopt(zmq.IPV6, "[" in address)
            opened.bind(address)
        except (zmq.ZMQError, OSError) as error:
            raise OSError(
                error.errno, f"KV events: {name} {endpoint}: {error.strerror}; choose another one"
            ) from None
        taken = opened.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(taken, bytes)
        text = taken.decode().rstrip("\0")
        host, _ = tcp_parts(endpoint)
        return f"tcp://{host}:{tcp_parts(text)[1]}" if host else text

    # In the thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            if self._replay is not None:
                poller.register(self._replay, zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send_waiting()
                if self._replay is not None and self._replay in ready:
                    self._send_replay(self._replay)
            self._send_waiting()
        except Exception:  # the engine continues without it; subscribers get no more batches
            log.exception("kv_events_stopped")
        finally:
            self._stopped = True
            for zmq_socket in (self._pub, self._replay):
                if zmq_socket is not None:
                    zmq_socket.close()
            self._context.term()

    def _send_waiting(self) -> None:
        form, size = self.settings.form, self.settings.block_size
        while self._waiting:
            number, unix_secs, events = self._waiting.popleft()
            payload = encode_batch(form, size, unix_secs, events)
            self._buffer.add(number, payload)
            self._pub.send_multipart([self._topic, _bytes(number), payload])

    def _send_replay(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            log.warning("kv_events_replay_refused frames=%d", len(frames))
            return
        peer, empty, asked = frames
        # SGLang replays only number and payload.
        head = [peer, empty, self._topic] if self.settings.form == "vllm" else [peer, empty]
        for number, payload in self._buffer.since(int.from_bytes(asked, "big")):
            router.send_multipart([*head, _bytes(number), payload])
        end = [peer, empty, b""] if self.settings.form == "vllm" else [peer, empty]
        router.send_multipart([*end, END, b""])


def _bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def _numeric(host: str) -> str:
    """The address of `host`: ZeroMQ binds addresses, not names. Raises OSError."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return str(addresses[0][4][0])


class PublishedChanges:
    """The cache listener that publishes the changes of its cache."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._held = HeldBlocks(publisher.settings.block_size)

    def on_stored(self, tokens: tuple[int, ...], dropped: Sequence[tuple[int, ...]]) -> None:
        self._publisher.publish(self._held.change(tokens, dropped))

    def on_cleared(self) -> None:
        self._publisher.publish(self._held.clear())
