"""Batches in the forms of both engines; vLLM's byte for byte as vLLM 0.32.0 sent it."""

import msgspec

from omni_proxy.replica.kv_events.held_blocks import AllCleared, BlocksRemoved, BlocksStored
from omni_proxy.replica.kv_events.payload import encode_batch

# Captured from vLLM 0.32.0: a block of 128 times token 12 that was stored at the beginning.
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


def test_a_stored_block_has_the_bytes_of_vllm():
    events = [BlocksStored((HIGH,), None, (12,) * 128)]
    assert encode_batch("vllm", 128, 1795369015.7618117, events) == STORED


def test_cleared_blocks_have_the_bytes_of_vllm():
    at = msgspec.msgpack.decode(CLEARED)[0]
    assert encode_batch("vllm", 16, at, [AllCleared()]) == CLEARED


def test_a_removed_block_of_vllm_is_an_event_of_its_own():
    payload = encode_batch("vllm", 16, 1.5, [BlocksRemoved((HIGH, 7))])
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [HIGH], "medium": "GPU", "group_idx": 0},
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
        ],
        0,
    ]


def test_a_run_of_blocks_of_vllm_is_one_event():
    payload = encode_batch("vllm", 2, 1.5, [BlocksStored((8, 9), 7, (1, 2, 3, 4))])
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert event["block_hashes"] == [8, 9]
    assert event["parent_block_hash"] == 7
    assert event["token_ids"] == [1, 2, 3, 4]
    assert event["extra_keys"] == [None, None]


def test_events_of_sglang_are_arrays_for_one_block_each_with_signed_hashes():
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
