import threading

import numpy as np
import pytest
import torch
from torch import nn

from omni_proxy.replica.models import tiny
from omni_proxy.replica.weights import live_tensors as exchange_module
from omni_proxy.replica.weights import live_tensors as subject
from omni_proxy.replica.weights import live_tensors as target_module
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


class Stubborn(torch.Tensor):
    """A tensor whose `copy_` fails after a number of calls."""

    left = 0

    def copy_(self, *given):
        if Stubborn.left == 0:
            raise RuntimeError("out of memory")
        Stubborn.left -= 1
        return super().copy_(*given)


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


def test_every_tensor_is_there_once_under_its_first_name():
    assert LiveTensors(Model()).names == ["a", "b"]
    assert len(LiveTensors(tiny.build()).names) == 38


def test_values_are_written_where_views_of_them_see_it():
    model = tiny.build(0)
    tokens = list(range(260, 290))
    new = StagedTensors(LiveTensors(model))
    for name, tensor in weights_of(1).items():
        new.add(name, tensor)
    places = [each.data_ptr() for each in model.parameters()]
    new.apply()
    assert [each.data_ptr() for each in model.parameters()] == places
    assert torch.equal(model.hidden(tokens), tiny.build(1).hidden(tokens))
    new.forget()
    assert len(new) == 0


def test_what_was_applied_can_be_undone():
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


def test_what_needs_no_way_back_is_put_in_its_place_without_one():
    model = Model()
    new = staged(LiveTensors(model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    new.apply_for_good()
    assert (model.a.tolist(), model.b.tolist()) == ([1, 1], [1, 2, 3])
    model.a = nn.Parameter(torch.zeros(2).expand(2)[::1], requires_grad=False)
    same = torch.full((2,), 4.0)
    other = staged(LiveTensors(model), a=same)
    other.add("b", torch.tensor([7, 7, 7]))
    other.apply_for_good()
    assert (model.a.tolist(), model.b.tolist()) == ([4, 4], [7, 7, 7])


def test_nothing_shows_before_it_is_applied():
    model = tiny.build(0)
    new = StagedTensors(LiveTensors(model))
    new.add(LAST_NORM, torch.ones(128))
    assert torch.equal(model.model.norm.weight, tiny.build(0).model.norm.weight)


def test_what_is_missing_of_a_whole_model_is_reported():
    target = LiveTensors(tiny.build(0))
    target.require_all([*target.names, "more"])
    names = [name for name in target.names if name != EMBEDDING]
    target.require_all([*names, "lm_head.weight"])
    with pytest.raises(WeightsError, match=r"37 of the model's 38 .*embed.* and 32 more; to ch"):
        target.require_all([LAST_NORM])


def test_a_type_is_turned_into_the_models_where_both_are_numbers_with_a_point():
    model = Model()
    new = staged(LiveTensors(model), a=torch.tensor([1, 2], dtype=torch.bfloat16))
    new.apply()
    assert model.a.tolist() == [1, 2]
    with pytest.raises(WeightsError, match=r"b is of torch.float32, which cannot become"):
        staged(LiveTensors(model), b=torch.ones(3))


@pytest.mark.parametrize(
    ("name", "form", "reported"),
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
def test_what_does_not_fit_is_refused_by_name(name, form, reported):
    with pytest.raises(WeightsError, match=reported) as refused:
        StagedTensors(LiveTensors(Model())).check(name, form)
    assert len(str(refused.value)) < 400


def test_an_alias_stands_for_the_tensor_it_is_tied_to_only_where_it_is_tied():
    target = LiveTensors(tiny.build(0))
    assert target.own_name("lm_head.weight") == EMBEDDING
    assert target.live("lm_head.weight") is target.live(EMBEDDING)
    with pytest.raises(WeightsError, match=r"no tensor 'lm_head.weight'"):
        LiveTensors(Model()).live("lm_head.weight")

    untied = Model()
    untied.head = nn.Parameter(torch.ones(1))
    assert LiveTensors(untied, {"head": "a"}).own_name("head") == "head"


def test_what_loaders_compute_by_themselves_is_passed_over():
    new = staged(LiveTensors(Model()), **{"l.rotary_emb.inv_freq": torch.ones(4)})
    new.check("l.rotary_emb.inv_freq", TensorSignature(torch.float32, (4,)))
    assert len(new) == 0


def test_later_values_take_the_place_of_earlier_ones():
    model = Model()
    first = staged(LiveTensors(model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    first.update(staged(LiveTensors(model), a=torch.full((2,), 5.0)))
    first.apply()
    assert (model.a.tolist(), model.b.tolist()) == ([5, 5], [1, 2, 3])


@pytest.fixture
def stubborn():
    """A model whose second tensor can be written `Stubborn.left` times."""
    model = Model()
    model.b = torch.tensor([7, 8, 9]).as_subclass(Stubborn)
    model.a.fill_(6)
    return model


def test_a_swap_that_fails_leaves_the_old_values(stubborn):
    # The clone is one, too: the restored value is a copy.
    new = staged(LiveTensors(stubborn), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    Stubborn.left = 0

    class Once(Exception):
        pass

    original = Stubborn.copy_

    def fail_once(self, *given):
        Stubborn.copy_ = lambda own, *values: torch.Tensor.copy_(own, *values)
        raise Once("no room")

    Stubborn.copy_ = fail_once
    try:
        with pytest.raises(ApplyError, match="Once: no room"):
            new.apply()
    finally:
        Stubborn.copy_ = original
    assert (stubborn.a.tolist(), stubborn.b.tolist()) == ([6, 6], [7, 8, 9])


def test_a_swap_that_cannot_be_undone_is_reported(stubborn):
    new = staged(LiveTensors(stubborn), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    Stubborn.left = 0
    with pytest.raises(DamagedWeightsError, match="out of memory"):
        new.apply()


def test_many_names_are_a_few_and_a_number():
    assert list_some(["a", "b"]) == "a, b"
    assert list_some([str(n) for n in range(9)]) == "0, 1, 2, 3, 4 and 4 more"
    assert short_repr("a'b") == repr("a'b")


def test_a_swap_for_good_that_breaks_off_never_calls_the_weights_whole(monkeypatch):
    def break_off(pairs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(target_module, "copy_tensors", break_off)
    model = torch.nn.Linear(2, 2)
    staged = StagedTensors(LiveTensors(model, {}))
    staged.add("weight", torch.ones(2, 2))
    with pytest.raises(DamagedWeightsError, match="new thread"):
        staged.apply_for_good()


def test_a_swap_without_memory_for_its_second_share_leaves_the_old_values(monkeypatch):
    model = Model()
    model.a.fill_(6)
    new = staged(LiveTensors(model), a=torch.ones(2), b=torch.tensor([1, 2, 3]))
    before = model.b.tolist()
    asked, empty = [], np.empty

    def refuse(*given):
        asked.append(given)
        if len(asked) == 3:  # one for the undo, then one for each share
            raise MemoryError("no room")
        return empty(*given)

    monkeypatch.setattr(exchange_module.np, "empty", refuse)
    with pytest.raises(ApplyError, match="MemoryError: no room"):
        new.apply()
    assert (model.a.tolist(), model.b.tolist()) == ([6, 6], before)


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


def test_a_shape_is_kept_and_a_view_has_the_new_values():
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
    """The allocation of the `nth` buffer fails."""
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
    else:  # fewer threads than shares were enough
        assert all(each.all() for each in live)
