import threading

import numpy as np
import pytest
import torch
from torch import nn

from omni_proxy.replica.models import tiny
from omni_proxy.replica.weights import live_tensors
from omni_proxy.replica.weights.live_tensors import (
    ApplyError,
    DamagedWeightsError,
    LiveTensors,
    StagedTensors,
    TensorSignature,
    WeightsError,
    can_swap,
    copy_tensors,
    list_some,
    short_repr,
    swap_tensors,
)
from tests.replica.weights.stage_fixture import weights_of

EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"


class FailingTensor(torch.Tensor):
    """A tensor whose `copy_` fails after `copies_left` calls."""

    copies_left = 0

    def copy_(self, *arguments):
        if FailingTensor.copies_left == 0:
            raise RuntimeError("out of memory")
        FailingTensor.copies_left -= 1
        return super().copy_(*arguments)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.twin = self.a
        self.register_buffer("b", torch.zeros(3, dtype=torch.int64))


def staged(target, **tensors):
    new = StagedTensors(target)
    for name, tensor in tensors.items():
        new.add(name, tensor)
    return new


def test_every_tensor_is_listed_once_under_its_first_name():
    assert LiveTensors(Model()).names == ["a", "b"]
    assert len(LiveTensors(tiny.build()).names) == 38


def test_values_are_written_in_place():
    model = tiny.build(0)
    tokens = list(range(260, 290))
    new = StagedTensors(LiveTensors(model))
    for name, tensor in weights_of(1).items():
        new.add(name, tensor)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    new.apply()
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert torch.equal(model.hidden(tokens), tiny.build(1).hidden(tokens))
    new.forget()
    assert len(new) == 0


def test_applied_values_can_be_undone():
    model = Model()
    model.a.fill_(6)
    new = staged(LiveTensors(model), a=torch.ones(2))
    new.apply()
    assert model.a.tolist() == [1, 1]
    new.undo()
    assert model.a.tolist() == [6, 6]
    new.forget()
    new.undo()
    assert model.a.tolist() == [6, 6]


def test_apply_for_good_replaces_the_values_without_an_undo():
    model = Model()
    new = staged(LiveTensors(model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    new.apply_without_rollback()
    assert (model.a.tolist(), model.b.tolist()) == ([1, 1], [1, 2, 3])
    model.a = nn.Parameter(torch.zeros(2).expand(2)[::1], requires_grad=False)
    full = torch.full((2,), 4.0)
    second = staged(LiveTensors(model), a=full)
    second.add("b", torch.tensor([7, 7, 7]))
    second.apply_without_rollback()
    assert (model.a.tolist(), model.b.tolist()) == ([4, 4], [7, 7, 7])


def test_staged_values_are_not_visible_before_they_are_applied():
    model = tiny.build(0)
    new = StagedTensors(LiveTensors(model))
    new.add(LAST_NORM, torch.ones(128))
    assert torch.equal(model.model.norm.weight, tiny.build(0).model.norm.weight)


def test_missing_tensors_of_a_whole_model_are_reported():
    target = LiveTensors(tiny.build(0))
    target.require_all([*target.names, "more"])
    names = [name for name in target.names if name != EMBEDDING]
    target.require_all([*names, "lm_head.weight"])
    with pytest.raises(WeightsError, match=r"37 of the model's 38 .*embed.* and 32 more; to ch"):
        target.require_all([LAST_NORM])


def test_floats_are_converted_to_the_dtype_of_the_model_and_other_types_refused():
    model = Model()
    new = staged(LiveTensors(model), a=torch.tensor([1, 2], dtype=torch.bfloat16))
    new.apply()
    assert model.a.tolist() == [1, 2]
    with pytest.raises(WeightsError, match=r"b is of torch.float32, which cannot become"):
        staged(LiveTensors(model), b=torch.ones(3))


@pytest.mark.parametrize(
    ("name", "signature", "reason"),
    [
        ("c", TensorSignature(torch.float32, (2,)), "the model has no tensor 'c'"),
        ("x" * 9999, TensorSignature(torch.float32, (2,)), r"no tensor 'xxx.*\.\.\."),
        (
            "a",
            TensorSignature(torch.float32, (1, 2)),
            r"a has the shape \[1, 2\]; the model's has \[2\]",
        ),
        ("a", TensorSignature(torch.float32, ()), r"a has the shape \[\]"),
        ("b", TensorSignature(torch.int32, (3,)), "b is of torch.int32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(name, signature, reason):
    with pytest.raises(WeightsError, match=reason) as caught:
        StagedTensors(LiveTensors(Model())).check(name, signature)
    assert len(str(caught.value)) < 400


def test_an_alias_names_its_tied_tensor_only_if_the_model_ties_them():
    target = LiveTensors(tiny.build(0))
    assert target.own_name("lm_head.weight") == EMBEDDING
    assert target.live("lm_head.weight") is target.live(EMBEDDING)
    with pytest.raises(WeightsError, match=r"no tensor 'lm_head.weight'"):
        LiveTensors(Model()).live("lm_head.weight")

    untied = Model()
    untied.head = nn.Parameter(torch.ones(1))
    assert LiveTensors(untied, {"head": "a"}).own_name("head") == "head"


def test_tensors_that_loaders_compute_themselves_are_skipped():
    new = staged(LiveTensors(Model()), **{"l.rotary_emb.inv_freq": torch.ones(4)})
    new.check("l.rotary_emb.inv_freq", TensorSignature(torch.float32, (4,)))
    assert len(new) == 0


def test_later_values_replace_earlier_ones():
    model = Model()
    first = staged(LiveTensors(model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    first.update(staged(LiveTensors(model), a=torch.full((2,), 5.0)))
    first.apply()
    assert (model.a.tolist(), model.b.tolist()) == ([5, 5], [1, 2, 3])


@pytest.fixture
def failing_model():
    """A model whose second tensor can be written `FailingTensor.copies_left` times."""
    model = Model()
    model.b = torch.tensor([7, 8, 9]).as_subclass(FailingTensor)
    model.a.fill_(6)
    return model


def test_a_swap_that_fails_leaves_the_old_values(failing_model):
    # The clone for the undo is a FailingTensor, too.
    new = staged(LiveTensors(failing_model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    FailingTensor.copies_left = 0

    class FirstCopyFailed(Exception):
        pass

    original = FailingTensor.copy_

    def fail_once(self, *arguments):
        FailingTensor.copy_ = lambda tensor, *values: torch.Tensor.copy_(tensor, *values)
        raise FirstCopyFailed("no room")

    FailingTensor.copy_ = fail_once
    try:
        with pytest.raises(ApplyError, match="FirstCopyFailed: no room"):
            new.apply()
    finally:
        FailingTensor.copy_ = original
    assert (failing_model.a.tolist(), failing_model.b.tolist()) == ([6, 6], [7, 8, 9])


def test_a_swap_that_cannot_be_undone_is_reported(failing_model):
    new = staged(LiveTensors(failing_model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    FailingTensor.copies_left = 0
    with pytest.raises(DamagedWeightsError, match="out of memory"):
        new.apply()


def test_a_long_list_of_names_is_shortened():
    assert list_some(["a", "b"]) == "a, b"
    assert list_some([str(n) for n in range(9)]) == "0, 1, 2, 3, 4 and 4 more"
    assert short_repr("a'b") == repr("a'b")


def test_a_failed_swap_without_an_undo_is_reported_as_damage(monkeypatch):
    def fail(pairs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(live_tensors, "copy_tensors", fail)
    model = torch.nn.Linear(2, 2)
    new = StagedTensors(LiveTensors(model, {}))
    new.add("weight", torch.ones(2, 2))
    with pytest.raises(DamagedWeightsError, match="new thread"):
        new.apply_without_rollback()


def test_a_swap_without_memory_for_its_second_share_leaves_the_old_values(monkeypatch):
    model = Model()
    model.a.fill_(6)
    new = staged(LiveTensors(model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    before = model.b.tolist()
    allocations, empty = [], np.empty

    def allocate(*arguments):
        allocations.append(arguments)
        if len(allocations) == 3:  # the first is for the undo, then one for each share
            raise MemoryError("no room")
        return empty(*arguments)

    monkeypatch.setattr(live_tensors.np, "empty", allocate)
    with pytest.raises(ApplyError, match="MemoryError: no room"):
        new.apply()
    assert (model.a.tolist(), model.b.tolist()) == ([6, 6], before)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(live_tensors, "PIECE_BYTES", 48)
    monkeypatch.setattr(live_tensors, "SHARE_BYTES", 160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 11, 12, 13, 1000])
def test_a_swap_exchanges_the_values_of_both_tensors(small_pieces, dtype, count):
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64) % 2
    first, second = raw.to(torch.uint8).view(dtype), (1 - raw).to(torch.uint8).view(dtype)
    before = first.clone(), second.clone()
    swap_tensors([(first, second)])
    assert torch.equal(first.view(torch.uint8), before[1].view(torch.uint8))
    assert torch.equal(second.view(torch.uint8), before[0].view(torch.uint8))


def test_a_view_of_a_swapped_tensor_has_the_new_values():
    live = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    view = live[1]
    swap_tensors([(live, torch.arange(12.0).view(3, 4))])
    assert view.tolist() == [4, 5, 6, 7]


def test_only_tensors_with_contiguous_memory_of_their_own_can_be_swapped():
    live, used_twice = torch.zeros(4), torch.ones(4)
    pairs = [
        (live, torch.ones(4)),
        (torch.zeros(4), torch.ones(4, dtype=torch.float64)),
        (torch.zeros(2, 2).t(), torch.ones(2, 2)),
        (torch.zeros(3, 2).t(), torch.ones(2, 3)),
        (torch.zeros(0), torch.zeros(0)),
        (live, live),
        (torch.zeros(4), used_twice),
        (torch.zeros(4), used_twice),
        (torch.zeros(4, device="meta"), torch.ones(4)),
    ]
    assert can_swap(pairs) == [True, False, False, False, False, False, True, False, False]


def test_a_copy_leaves_its_source_unchanged(small_pieces):
    live, new = torch.zeros(77, dtype=torch.bfloat16), torch.arange(77, dtype=torch.bfloat16)
    copy_tensors([(live, new)])
    assert live.tolist() == new.tolist() == list(map(float, range(77)))
    copy_tensors([])
    swap_tensors([])


def fail_allocation(monkeypatch, nth):
    """Makes the allocation of the `nth` buffer fail."""
    allocations, empty = [], np.empty

    def allocate(*arguments):
        allocations.append(arguments)
        if len(allocations) == nth:
            raise MemoryError("no room")
        return empty(*arguments)

    monkeypatch.setattr(live_tensors.np, "empty", allocate)


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_swap_that_fails_at_any_share_exchanges_nothing(small_pieces, monkeypatch, nth):
    pairs = [(torch.zeros(99), torch.ones(99)), (torch.zeros(70), torch.ones(70))]
    fail_allocation(monkeypatch, nth)
    with pytest.raises(MemoryError, match="no room"):
        swap_tensors(pairs)
    for live, new in pairs:
        assert not live.any()
        assert new.all()


@pytest.mark.parametrize("threads", range(3))
def test_a_swap_that_cannot_start_its_threads_exchanges_nothing(small_pieces, monkeypatch, threads):
    started, start = [], threading.Thread.start

    def start_or_fail(thread):
        started.append(thread)
        if len(started) > threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(live_tensors.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    pairs = [(torch.zeros(99), torch.ones(99)) for _ in range(9)]
    live = [tensor for tensor, _ in pairs]
    try:
        swap_tensors(pairs)
    except RuntimeError:
        assert not any(tensor.any() for tensor in live)
    else:  # fewer threads than shares were enough
        assert all(tensor.all() for tensor in live)
