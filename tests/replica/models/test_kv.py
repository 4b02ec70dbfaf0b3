import pytest
import torch

from omni_proxy.replica.models.kv import PAGE_TOKENS, ContextFull, KVShape, SequenceKV

SHAPE = KVShape(layers=2, kv_heads=3, head_size=4, limit=10 * PAGE_TOKENS)
LIKE = torch.empty(0)


def append(kv: SequenceKV, count: int, first: float) -> None:
    """Append tokens whose keys and values are distinct numbers for each token and layer."""
    kv.reserve(count)
    for layer in range(SHAPE.layers):
        rows = (
            torch.arange(count).view(count, 1, 1, 1)
            + first
            + torch.tensor([0.0, 0.5])[:, None, None]
        )
        kv.write(layer, (rows + 1000 * layer).expand(count, 2, SHAPE.kv_heads, SHAPE.head_size))
    kv.length += count


def numbers_of(kv: SequenceKV) -> list[float]:
    """The numbers of layer 1, which are read by writing one more token that is not kept."""
    kv.reserve(1)
    keys, values = kv.write(1, torch.zeros(1, 2, SHAPE.kv_heads, SHAPE.head_size))
    assert torch.equal(keys[:, :-1] + 0.5, values[:, :-1])
    assert (keys == keys[:1, :, :1]).all()
    return (keys[0, :-1, 0] - 1000).tolist()


def test_written_keys_and_values_are_unchanged_by_growth():
    kv = SequenceKV(SHAPE, LIKE)
    for start in range(0, 300, 7):
        append(kv, 7, start)
    assert numbers_of(kv) == list(range(301))


def test_a_fork_and_its_origin_are_independent():
    origin = SequenceKV(SHAPE, LIKE)
    append(origin, 5, 0)
    fork = origin.fork(3)
    append(fork, 2, 100)
    origin.truncate(1)
    append(origin, 1, 200)
    assert numbers_of(fork) == [0, 1, 2, 100, 101]
    assert numbers_of(origin) == [0, 200]


def test_a_fork_of_a_short_prefix_needs_no_memory_for_the_rest():
    origin = SequenceKV(SHAPE, LIKE)
    append(origin, 8 * PAGE_TOKENS, 0)
    assert origin.fork(3).nbytes == SequenceKV(SHAPE, LIKE).nbytes < origin.nbytes
    token_bytes = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size * 4
    assert origin.nbytes >= 8 * PAGE_TOKENS * token_bytes


def test_a_fork_or_truncation_beyond_the_length_is_refused():
    kv = SequenceKV(SHAPE, LIKE)
    append(kv, 2, 0)
    for count in (-1, 3):
        with pytest.raises(ValueError, match=f"{count} tokens requested, the sequence has 2"):
            kv.fork(count)
        with pytest.raises(ValueError, match=f"{count} tokens requested, the sequence has 2"):
            kv.truncate(count)
    assert kv.length == 2


def test_the_context_can_be_filled_exactly_to_its_limit():
    kv = SequenceKV(SHAPE, LIKE)
    append(kv, SHAPE.limit - 1, 0)
    with pytest.raises(ContextFull, match="641 tokens do not fit: the model's context is 640"):
        kv.reserve(2)
    append(kv, 1, 0)
    assert kv.length == kv.capacity == SHAPE.limit
    assert kv.fork(SHAPE.limit).length == SHAPE.limit
