import threading

import numpy as np
import pytest
import torch
from torch import nn

from omni_proxy.replica.weights import live_tensors as subject
from omni_proxy.replica.weights.live_tensors import can_swap, copy_tensors, swap_tensors


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(subject, "PIECE_BYTES", 48)
    monkeypatch.setattr(subject, "SHARE_BYTES", 160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 11, 12, 13, 1000])
def test_both_hold_afterwards_what_the_other_held(small_pieces, dtype, count):
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64) % 2
    one, other = raw.to(torch.uint8).view(dtype), (1 - raw).to(torch.uint8).view(dtype)
    was = one.clone(), other.clone()
    swap_tensors([(one, other)])
    assert torch.equal(one.view(torch.uint8), was[1].view(torch.uint8))
    assert torch.equal(other.view(torch.uint8), was[0].view(torch.uint8))


def test_a_shape_is_kept_and_a_view_sees_the_new_values():
    live = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    view = live[1]
    swap_tensors([(live, torch.arange(12.0).view(3, 4))])
    assert view.tolist() == [4, 5, 6, 7]


def test_what_is_no_plain_memory_of_its_own_is_not_exchanged():
    live, twice = torch.zeros(4), torch.ones(4)
    pairs = [
        (live, torch.ones(4)),
        (torch.zeros(4), torch.ones(4, dtype=torch.float64)),
        (torch.zeros(2, 2).t(), torch.ones(2, 2)),
        (torch.zeros(3, 2).t(), torch.ones(2, 3)),
        (torch.zeros(0), torch.zeros(0)),
        (live, live),
        (torch.zeros(4), twice),
        (torch.zeros(4), twice),
        (torch.zeros(4, device="meta"), torch.ones(4)),
    ]
    assert can_swap(pairs) == [True, False, False, False, False, False, True, False, False]


def test_a_copy_leaves_its_source_unchanged(small_pieces):
    live, new = torch.zeros(77, dtype=torch.bfloat16), torch.arange(77, dtype=torch.bfloat16)
    copy_tensors([(live, new)])
    assert live.tolist() == new.tolist() == list(map(float, range(77)))
    copy_tensors([])
    swap_tensors([])


def failing_at(monkeypatch, nth):
    """The `nth` buffer that is asked for cannot be had."""
    asked, empty = [], np.empty

    def refuse(*given):
        asked.append(given)
        if len(asked) == nth:
            raise MemoryError("no room")
        return empty(*given)

    monkeypatch.setattr(subject.np, "empty", refuse)


@pytest.mark.parametrize("nth", range(1, 7))
def test_an_exchange_that_fails_at_any_share_has_exchanged_nothing(small_pieces, monkeypatch, nth):
    pairs = [(torch.zeros(99), torch.ones(99)), (torch.zeros(70), torch.ones(70))]
    failing_at(monkeypatch, nth)
    with pytest.raises(MemoryError, match="no room"):
        swap_tensors(pairs)
    for live, new in pairs:
        assert not live.any()
        assert new.all()


@pytest.mark.parametrize("threads", range(3))
def test_an_exchange_without_threads_has_exchanged_nothing(small_pieces, monkeypatch, threads):
    started, start = [], threading.Thread.start

    def refuse(thread):
        started.append(thread)
        if len(started) > threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(subject.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pairs = [(torch.zeros(99), torch.ones(99)) for _ in range(9)]
    live = [each for each, _ in pairs]
    try:
        swap_tensors(pairs)
    except RuntimeError:
        assert not any(each.any() for each in live)
    else:  # those that came up were idle in time for all the others
        assert all(each.all() for each in live)
