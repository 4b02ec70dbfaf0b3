import pytest
import torch

from omni_proxy.replica.models.kv import PAGE_TOKENS, ContextFull, KVShape, SequenceKV

SHAPE = KVShape(layers=2, kv_heads=3, head_size=4, limit=10 * PAGE_TOKENS)
LIKE = torch.empty(0)


def appended(kv: SequenceKV, count: int, first: float) -> None:
    """Gives each token, layer, and half its own number."""
    kv.reserve(count)
    for layer in range(SHAPE.layers):
        rows = (
            torch.arange(count).view(count, 1, 1, 1)
            + first
            + torch.tensor([0.0, 0.5])[:, None, None]
        )
        kv.write(layer, (rows + 1000 * layer).expand(count, 2, SHAPE.kv_heads, SHAPE.head_size))
    kv.length += count


def held(kv: SequenceKV) -> list[float]:
    """The values of layer 1, read by a probe without side effects."""
    kv.reserve(1)
    keys, values = kv.write(1, torch.zeros(1, 2, SHAPE.kv_heads, SHAPE.head_size))
    assert torch.equal(keys[:, :-1] + 0.5, values[:, :-1])
    assert (keys == keys[:1, :, :1]).all()
    return (keys[0, :-1, 0] - 1000).tolist()


def test_what_was_written_stays_through_growth():
    kv = SequenceKV(SHAPE, LIKE)
    for start in range(0, 300, 7):
        appended(kv, 7, start)
    assert held(kv) == list(range(301))


def test_a_fork_and_its_origin_do_not_see_each_other():
    origin = SequenceKV(SHAPE, LIKE)
    appended(origin, 5, 0)
    fork = origin.fork(3)
    appended(fork, 2, 100)
    origin.truncate(1)
    appended(origin, 1, 200)
    assert held(fork) == [0, 1, 2, 100, 101]
    assert held(origin) == [0, 200]


def test_a_fork_of_a_short_prefix_does_not_take_the_memory_of_the_whole():
    origin = SequenceKV(SHAPE, LIKE)
    appended(origin, 8 * PAGE_TOKENS, 0)
    assert origin.fork(3).nbytes == SequenceKV(SHAPE, LIKE).nbytes < origin.nbytes
    token_bytes = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size * 4
    assert origin.nbytes >= 8 * PAGE_TOKENS * token_bytes


def test_only_what_is_held_can_be_forked_or_kept():
    kv = SequenceKV(SHAPE, LIKE)
    appended(kv, 2, 0)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"{wrong} tokens requested, the sequence has 2"):
            kv.fork(wrong)
        with pytest.raises(ValueError, match=f"{wrong} tokens requested, the sequence has 2"):
            kv.truncate(wrong)
    assert kv.length == 2


def test_the_context_is_filled_to_its_last_token_and_no_further():
    kv = SequenceKV(SHAPE, LIKE)
    appended(kv, SHAPE.limit - 1, 0)
    with pytest.raises(ContextFull, match="641 tokens do not fit: the model's context is 640"):
        kv.reserve(2)
    appended(kv, 1, 0)
    assert kv.length == kv.capacity == SHAPE.limit
    assert kv.fork(SHAPE.limit).length == SHAPE.limit
