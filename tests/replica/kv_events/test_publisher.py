"""The publisher with real sockets on loopback."""

import os
import socket
import threading
from dataclasses import dataclass

import msgspec
import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_proxy.replica.kv_events import publisher as publisher_module
from omni_proxy.replica.kv_events.publisher import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    HeldBlocks,
    KvEventPublisher,
    PublishedChanges,
    ReplayBuffer,
    block_hashes,
    encode_batch,
)
from omni_proxy.replica.kv_events.publisher_settings import KvEventSettings, parse_kv_event_settings
from omni_proxy.replica.text.prefix_cache import PrefixCache
from tests.example_counts import examples

PATIENCE_MS = 20_000
END = b"\xff" * 8


class Sockets:
    """Closes all its sockets at the end: an unclosed one would cause a warning."""

    def __init__(self, context):
        self._context = context
        self._opened = []

    def socket(self, kind):
        self._opened.append(self._context.socket(kind))
        self._opened[-1].setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        return self._opened[-1]

    def close(self):
        for opened in self._opened:
            opened.close(0)


@pytest.fixture
def context():
    with zmq.Context() as zmq_context:
        sockets = Sockets(zmq_context)
        yield sockets
        sockets.close()


@pytest.fixture
def opened():
    publishers = []

    def start(**params):
        params = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"} | params
        publishers.append(KvEventPublisher(parse_kv_event_settings(params), now=lambda: 1.5))
        return publishers[-1]

    yield start
    for publisher in publishers:
        publisher.close()


def local(endpoint):
    return endpoint.replace("*", "127.0.0.1")


def subscribed(context, publisher):
    """A reader whose subscription is active. Batches before that are not delivered."""
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"")
    reader.connect(local(publisher.endpoint))
    while not reader.poll(20):
        publisher.publish([AllCleared()])
    return reader


def request_replay(context, publisher, frames):
    dealer = context.socket(zmq.DEALER)
    dealer.connect(local(publisher.replay_endpoint))
    dealer.send_multipart(frames)
    return dealer


def replayed(context, publisher, first=0):
    """All replayed batches, without the end mark."""
    dealer = request_replay(context, publisher, [b"", first.to_bytes(8, "big")])
    batches = []
    while (frames := dealer.recv_multipart())[-2] != END:
        batches.append(frames)
    return batches


def numbers(batches):
    return [int.from_bytes(frames[-2], "big") for frames in batches]


def until_replayed(context, publisher, count):
    """Waits until `count` batches can be replayed: the thread has sent them."""
    while len(batches := replayed(context, publisher)) < count:
        pass
    return batches


def test_a_subscriber_receives_topic_number_and_payload(context, opened):
    publisher = opened(topic="kv")
    reader = subscribed(context, publisher)
    publisher.publish([BlocksStored((7,), None, tuple(range(16)))])
    received = [reader.recv_multipart()]
    while b"BlockStored" not in received[-1][2]:
        received.append(reader.recv_multipart())
    first, last = numbers([received[0], received[-1]])
    assert last - first == len(received) - 1 > 0
    assert {frames[0] for frames in received} == {b"kv"}
    assert msgspec.msgpack.decode(received[-1][2])[0] == 1.5


def test_numbers_begin_at_0_and_replays_have_four_frames(context, opened):
    publisher = opened(topic="kv")
    for _ in range(3):
        publisher.publish([AllCleared()])
    batches = until_replayed(context, publisher, 3)
    assert [frames[:3] for frames in batches] == [
        [b"", b"kv", number.to_bytes(8, "big")] for number in range(3)
    ]
    assert numbers(replayed(context, publisher, 2)) == [2]
    dealer = request_replay(context, publisher, [b"", (10**9).to_bytes(8, "big")])
    assert dealer.recv_multipart() == [b"", b"", END, b""]


def test_replays_of_sglang_have_no_topic(context, opened):
    publisher = opened(form="sglang")
    publisher.publish([AllCleared()])
    (batch,) = until_replayed(context, publisher, 1)
    assert batch[:2] == [b"", bytes(8)]
    assert len(batch) == 3
    dealer = request_replay(context, publisher, [b"", bytes([1] * 8)])
    assert dealer.recv_multipart() == [b"", END, b""]


def test_exactly_the_whole_buffer_is_replayed(context, opened):
    publisher = opened(buffer_steps=3000)
    for _ in range(3500):
        publisher.publish([AllCleared()])
    batches = until_replayed(context, publisher, 3000)
    while numbers(batches)[-1] != 3499:
        batches = replayed(context, publisher)
    assert numbers(batches) == list(range(500, 3500))


def test_malformed_replay_requests_are_ignored(context, opened):
    publisher = opened()
    publisher.publish([AllCleared()])
    for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b""], [b"", b"", b"", b""]):
        assert not request_replay(context, publisher, frames).poll(20)
    assert numbers(until_replayed(context, publisher, 1)) == [0]


def test_batches_that_exceed_the_queue_leave_a_gap_in_the_numbers(context, opened, monkeypatch):
    may_send, send_waiting = threading.Event(), KvEventPublisher._send_waiting

    def wait_and_send(self):
        may_send.wait(20)
        send_waiting(self)

    monkeypatch.setattr(KvEventPublisher, "_send_waiting", wait_and_send)
    publisher = opened(max_queue_size=2)
    for _ in range(5):
        publisher.publish([AllCleared()])
    may_send.set()
    assert numbers(until_replayed(context, publisher, 2)) == [0, 1]
    publisher.publish([AllCleared()])
    assert numbers(until_replayed(context, publisher, 3)) == [0, 1, 5]


def test_the_publisher_connects_to_an_endpoint_that_names_a_host(context, opened):
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"")
    port = reader.bind_to_random_port("tcp://127.0.0.1")
    publisher = opened(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint="")
    assert publisher.endpoint == f"tcp://127.0.0.1:{port}"
    while not reader.poll(20):
        publisher.publish([AllCleared()])
    assert len(reader.recv_multipart()) == 3


def test_a_port_in_use_is_named_in_the_error(opened):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"replay_endpoint tcp://\\*:{port}: Address already in"):
            KvEventPublisher(
                KvEventSettings(endpoint="tcp://*:0", replay_endpoint=f"tcp://*:{port}")
            )


def test_closing_sends_waiting_batches_and_frees_the_ports(context, opened):
    publisher = opened()
    reader = subscribed(context, publisher)
    publisher.publish([BlocksStored((7,), None, tuple(range(16)))])
    publisher.close()
    while b"BlockStored" not in reader.recv_multipart()[2]:
        pass
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(publisher.endpoint.rpartition(":")[2])))
    publisher.publish([AllCleared()])  # ignored after close
    publisher.close()


def test_closing_a_publisher_whose_thread_failed_closes_its_files(opened, monkeypatch, caplog):
    def fail(*_):
        raise ValueError("no payload")

    monkeypatch.setattr(publisher_module, "encode_batch", fail)
    publisher = opened()
    publisher.publish([AllCleared()])
    publisher._thread.join(30)
    assert "kv_events_stopped" in caplog.text
    publisher.publish([AllCleared()])  # ignored
    publisher.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(publisher._wake)


def test_changes_of_a_cache_are_published(context, opened):
    publisher = opened(block_size=2)
    changes = PublishedChanges(publisher)
    changes.on_stored((1, 2, 3), [])
    changes.on_stored((1, 2), [])  # covered by the entry above
    changes.on_cleared()
    events = [
        msgspec.msgpack.decode(frames[-1])[1] for frames in until_replayed(context, publisher, 2)
    ]
    assert [batch[0]["type"] for batch in events] == ["BlockStored", "AllBlocksCleared"]


def test_a_replay_buffer_is_bounded_in_number_and_in_bytes():
    buffer = ReplayBuffer(max_batches=3, max_bytes=10)
    for number in range(5):
        buffer.add(number, b"xx")
    assert [number for number, _ in buffer.since(0)] == [2, 3, 4]
    buffer.add(5, b"x" * 9)
    assert [number for number, _ in buffer.since(0)] == [5]
    buffer.add(6, b"x" * 11)
    assert list(buffer.since(0)) == []


# Captured from vLLM 0.32.0: a block that holds token 12 128 times and has no parent.
STORED = bytes.fromhex(
    "93cb41dac0ca0df0c186918ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "91cfa496c10a93bd6c5eb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0080"
    + 128
    * "0c"
    + "aa626c6f636b5f73697a65cc80a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64"
    "ae66756c6c5f617474656e74696f6e00"
)
CLEARED = bytes.fromhex("93cb41dac0c9df4202fb9181a474797065b0416c6c426c6f636b73436c656172656400")
HIGH = 11859878919899278430  # above 2**63


def test_a_stored_block_is_encoded_as_by_vllm():
    events = [BlocksStored((HIGH,), None, (12,) * 128)]
    assert encode_batch("vllm", 128, 1795369015.7618117, events) == STORED


def test_cleared_blocks_are_encoded_as_by_vllm():
    timestamp = msgspec.msgpack.decode(CLEARED)[0]
    assert encode_batch("vllm", 16, timestamp, [AllCleared()]) == CLEARED


def test_the_vllm_form_has_one_event_for_each_removed_block():
    payload = encode_batch("vllm", 16, 1.5, [BlocksRemoved((HIGH, 7))])
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [HIGH], "medium": "GPU", "group_idx": 0},
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
        ],
        0,
    ]


def test_the_vllm_form_has_one_event_for_consecutive_stored_blocks():
    payload = encode_batch("vllm", 2, 1.5, [BlocksStored((8, 9), 7, (1, 2, 3, 4))])
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert event["block_hashes"] == [8, 9]
    assert event["parent_block_hash"] == 7
    assert event["token_ids"] == [1, 2, 3, 4]
    assert event["extra_keys"] == [None, None]


def test_the_sglang_form_has_one_array_for_each_block_with_signed_hashes():
    events = [BlocksRemoved((HIGH,)), BlocksStored((HIGH, 9), 7, (1, 2, 3, 4)), AllCleared()]
    assert msgspec.msgpack.decode(encode_batch("sglang", 2, 1.5, events)) == [
        1.5,
        [
            ["BlockRemoved", [HIGH - 2**64], "GPU"],
            ["BlockStored", [HIGH - 2**64], 7, [1, 2], 2, None, "GPU"],
            ["BlockStored", [9], HIGH - 2**64, [3, 4], 2, None, "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


BLOCK = 3
MAX_ENTRIES, MAX_BYTES = 3, 40

token_lists = st.lists(st.integers(0, 1), max_size=14)


@dataclass(frozen=True)
class Tokens:
    tokens: tuple[int, ...]

    @property
    def length(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        return len(self.tokens)

    def fork(self, length):
        return Tokens(self.tokens[:length])


class Reader:
    """Reconstructs the tokens of each block from the events alone."""

    def __init__(self):
        self.texts = {}

    def read(self, events):
        for event in events:
            match event:
                case BlocksStored(hashes, parent, tokens):
                    assert len(tokens) == BLOCK * len(hashes)
                    for index, block in enumerate(hashes):
                        assert block not in self.texts
                        block_tokens = tokens[index * BLOCK : (index + 1) * BLOCK]
                        self.texts[block] = (self.texts[parent] if parent else ()) + block_tokens
                        parent = block
                case BlocksRemoved(hashes):
                    for block in hashes:
                        removed = self.texts.pop(block)
                        longer = [text for text in self.texts.values() if len(text) > len(removed)]
                        assert removed not in [text[: len(removed)] for text in longer]
                case _:
                    self.texts.clear()


class EventsOfACache(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(MAX_ENTRIES, MAX_BYTES, min_tokens=1)
        self.cache.listener = self
        self.blocks = HeldBlocks(BLOCK)
        self.reader = Reader()
        self.entries = []

    def on_stored(self, tokens, dropped):
        self.entries = [entry for entry in self.entries if entry not in dropped] + [tokens]
        self.reader.read(self.blocks.change(tokens, dropped))

    def on_cleared(self):
        self.entries = []
        self.reader.read(self.blocks.clear())

    @rule(tokens=token_lists)
    def store(self, tokens):
        self.cache.store(tokens, Tokens(tuple(tokens)), self.cache.epoch)

    @rule(tokens=token_lists.filter(bool))
    def copy_longest_prefix(self, tokens):
        self.cache.copy_longest_prefix(tokens)

    @rule()
    def flush(self):
        self.cache.flush()

    @invariant()
    def the_reader_has_exactly_the_blocks_of_the_entries(self):
        assert len(self.entries) == len(self.cache)
        kept = {
            entry[:end] for entry in self.entries for end in range(BLOCK, len(entry) + 1, BLOCK)
        }
        assert set(self.reader.texts.values()) == kept
        assert set(self.reader.texts) == self.blocks.held


TestEventsOfACache = EventsOfACache.TestCase
TestEventsOfACache.settings = settings(max_examples=examples(50), stateful_step_count=25)


def test_a_hash_covers_the_block_and_all_blocks_before_it():
    hashes = list(block_hashes([1, 2, 3, 4], 2))
    assert hashes == list(block_hashes([1, 2, 3, 4, 5], 2))
    assert hashes[0] == next(block_hashes([1, 2], 2))
    assert hashes[1] not in block_hashes([3, 4, 3, 4], 2)
    assert all(0 <= block < 2**64 for block in hashes)


def test_hashes_are_the_same_in_every_process():
    assert list(block_hashes(range(32), 16)) == [11960025834380122447, 5935103421891022402]


def test_a_longer_text_stores_only_its_new_blocks():
    blocks = HeldBlocks(2)
    (first,) = blocks.change((1, 2, 3), [])
    (second,) = blocks.change((1, 2, 3, 4, 5, 6), [(1, 2, 3)])
    assert (first.parent, first.tokens) == (None, (1, 2))
    assert (second.parent, second.tokens) == (first.hashes[0], (3, 4, 5, 6))


def test_a_text_without_a_complete_block_is_no_event():
    blocks = HeldBlocks(16)
    assert blocks.change((1, 2, 3), []) == []
    assert blocks.change((4, 5), [(1, 2, 3)]) == []


def test_removals_precede_the_block_that_needed_the_room():
    blocks = HeldBlocks(2)
    (old,) = blocks.change((1, 2, 3, 4), [])
    removed, stored = blocks.change((5, 6), [(1, 2, 3, 4)])
    assert removed.hashes == tuple(reversed(old.hashes))
    assert stored.tokens == (5, 6)
