import json
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.kv_events.event_payload import (
    MAX_UNDECODABLE,
    ClearedEvent,
    DecodedBatch,
    RemovedEvent,
    StoredEvent,
    UndecodablePayload,
    decode_batch,
)

CAPTURES = Path(__file__).parent / "captures"
TOKENS = list(range(32))


def batch(*events, rank=None):
    return msgspec.msgpack.encode([12.5, list(events), rank])


def stored(**fields):
    return {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
        "token_ids": TOKENS, "block_size": 16,
    } | fields  # fmt: skip


def captured(name):
    return [json.loads(line) for line in (CAPTURES / name).read_text().splitlines()]


def test_every_captured_batch_of_vllm_is_decoded():
    batches = [
        decode_batch(bytes.fromhex(row["frames"][2])) for row in captured("vllm-0.32.0.jsonl")
    ]
    assert all(
        not decoded.undecodable and decoded.rank == 0 and decoded.published_at > 1e9
        for decoded in batches
    )
    first = batches[0].events[0]
    assert (first.hashes, first.parent, first.block_size) == ([15155571451565390775], None, 128)
    assert (len(first.tokens), first.medium, first.group, first.plain) == (128, "GPU", 0, 1)
    assert batches[1].events == [ClearedEvent()] * 6
    assert batches[2].events[0].plain == 0, "it has a cache salt"
    assert len(batches[3].events[0].hashes) == 5


def test_every_batch_in_the_format_of_sglang_is_decoded():
    batches = [decode_batch(bytes.fromhex(row["payload"])) for row in captured("sglang-form.jsonl")]
    assert all(not decoded.undecodable for decoded in batches)
    first, second, third, salted, removed, removed_from_gpu, cleared = (
        decoded.events[0] for decoded in batches
    )
    assert first == StoredEvent([2**64 - 5, 7], None, list(range(100, 132)), 16, "", None, 2)
    assert (second.parent, second.medium, second.plain) == (7, "GPU", 1)
    assert (third.plain, salted.plain) == (1, 0)
    assert removed == RemovedEvent([9], "", None)
    assert removed_from_gpu == RemovedEvent([8], "GPU", None)
    assert cleared == ClearedEvent()


def test_digests_are_folded_to_64_bits():
    digest = bytes(range(32))
    event = decode_batch(batch(stored(block_hashes=[digest, -1]))).events[0]
    assert event.hashes == [int.from_bytes(digest[-8:], "big"), 2**64 - 1]


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, 2),
        ({"extra_keys": [None, None]}, 2),
        ({"extra_keys": [None, ["tenant"]]}, 1),
        ({"extra_keys": [["tenant"], None]}, 0),
        ({"lora_id": 3}, 0),
        ({"lora_name": "sql"}, 0),
        ({"cache_salt": "tenant"}, 0),
        ({"a_field_of_a_later_version": {"x": 1}}, 2),
    ],
)
def test_blocks_of_adapters_and_salts_are_not_plain(fields, plain):
    assert decode_batch(batch(stored(**fields))).events[0].plain == plain


def test_blocks_of_layers_without_full_attention_are_ignored():
    events = [
        stored(group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored(group_idx=2, kv_cache_spec_kind="full_attention"),
        stored(group_idx=1),
    ]
    assert [event.group for event in decode_batch(batch(*events)).events] == [2]


@pytest.mark.parametrize(
    "event",
    [
        stored(token_ids=TOKENS[:-1]),
        stored(token_ids=[*TOKENS[:-1], "x"]),
        stored(token_ids=[*TOKENS[:-1], -1]),
        stored(token_ids=[*TOKENS[:-1], True]),
        stored(block_size=0),
        stored(block_hashes=[1, "2"]),
        stored(extra_keys=[None]),
        stored(medium=7),
        {"type": "BlockStored"},
        {"type": "BlockMoved", "block_hashes": [1]},
        {"block_hashes": [1]},
        ["BlockRemoved"],
        ["BlockRemoved", 7],
        [],
        7,
    ],
)
def test_an_undecodable_event_is_counted(event):
    decoded = decode_batch(batch({"type": "AllBlocksCleared"}, event))
    assert (decoded.events, len(decoded.undecodable)) == ([ClearedEvent()], 1)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode([1, 2])])
def test_a_payload_that_is_not_a_batch_is_refused(payload):
    with pytest.raises(UndecodablePayload):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(payload):
    with suppress(UndecodablePayload):
        assert isinstance(decode_batch(payload), DecodedBatch)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
    | st.binary(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["type", "block_hashes", "token_ids", "block_size", "medium", "group_idx"]),
        st.sampled_from(["BlockStored", "BlockRemoved"]) | JSON,
    )
)
def test_an_event_with_any_values_is_decoded_or_counted(event):
    decoded = decode_batch(batch(event))
    assert len(decoded.events) + len(decoded.undecodable) <= 1


def test_the_number_of_undecodable_events_per_batch_is_bounded():
    batch = decode_batch(msgspec.msgpack.encode([1.0, [[]] * (2 * MAX_UNDECODABLE)]))
    assert len(batch.undecodable) == MAX_UNDECODABLE
