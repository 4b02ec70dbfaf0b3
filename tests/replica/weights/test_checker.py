import hashlib
from itertools import count

import pytest
import torch
from torch import nn

from omni_proxy.process_group.broadcast.tensor_hashing import roll_up, tensor_digest
from omni_proxy.replica.models import tiny
from omni_proxy.replica.weights.checker import WeightsChecker, digest_of
from omni_proxy.replica.weights.live_tensors import LiveTensors, WeightsError
from tests.replica.weights.stage_fixture import checksum_of, weights_of

LAYOUT = {"tp_size": 1, "rank": 0}
LAST_NORM = "model.norm.weight"


def checker_of(model, **options) -> WeightsChecker:
    return WeightsChecker(LiveTensors(model), LAYOUT, **options)


class Buffers(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.arange(4, dtype=torch.int64)[::2],
    ],
)
def test_any_tensor_has_the_digest_of_its_elements_in_order(tensor):
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    data = bytes(flat.tolist())
    assert digest_of("x", tensor) == tensor_digest("x", str(tensor.dtype), tensor.shape, data)


def test_a_bfloat16_scalar_has_its_known_digest():
    scalar = torch.tensor(1.0, dtype=torch.bfloat16)
    assert digest_of("s", scalar).startswith("876272530fc6b3130d68567368489a5a")


def test_a_checksum_reports_every_tensor_and_its_duration():
    seconds = count(5)
    data = checker_of(tiny.build(0), clock=lambda: next(seconds)).check("checksum")
    weights = weights_of(0)
    assert list(data) == [
        "action", "tensor_count", "checksums", "tensor_metadata", "per_gpu_checksum",
        "full_checksum", "layout", "elapsed_s",
    ]  # fmt: skip
    assert (data["action"], data["tensor_count"], data["elapsed_s"]) == ("checksum", 38, 1)
    assert data["per_gpu_checksum"] == data["full_checksum"] == checksum_of(weights)
    assert data["per_gpu_checksum"] == roll_up(data["checksums"])
    assert list(data["checksums"]) == list(weights)
    assert data["layout"] == LAYOUT
    assert data["tensor_metadata"][LAST_NORM] == {
        "name": LAST_NORM,
        "shape": [128],
        "dtype": "torch.float32",
        "sha256": data["checksums"][LAST_NORM],
    }


def test_the_checksum_of_no_tensors_is_the_hash_of_empty_bytes():
    data = checker_of(nn.Module()).check("checksum")
    assert data["tensor_count"] == 0
    assert data["per_gpu_checksum"] == hashlib.sha256(b"").hexdigest()


def test_a_tensor_with_two_names_is_counted_once():
    model = Buffers(a=torch.ones(2))
    model.register_buffer("b", model.a)
    assert list(checker_of(model).check("checksum")["checksums"]) == ["a"]


def test_a_comparison_needs_a_snapshot_and_keeps_it():
    model = tiny.build(0)
    checker = checker_of(model)
    with pytest.raises(WeightsError, match=r"^weights_checker compare requires snapshot first$"):
        checker.check("compare")
    assert checker.check("snapshot")["action"] == "snapshot"
    for _ in range(2):
        comparison = checker.check("compare")
        assert comparison["matched"] is True
        assert comparison["missing"] == comparison["unexpected"] == comparison["changed"] == []
    model.model.norm.weight[0] += 1
    model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    after_change = checker.check("compare")
    assert after_change["matched"] is False
    assert after_change["changed"] == ["model.layers.1.mlp.up_proj.weight", LAST_NORM]
    assert after_change["per_gpu_checksum"] != comparison["per_gpu_checksum"]


def test_a_reset_takes_a_snapshot_of_the_current_weights():
    model = tiny.build(0)
    checker = checker_of(model)
    checker.check("snapshot")
    model.model.norm.weight[0] += 1
    assert checker.check("reset_tensors")["action"] == "reset_tensors"
    assert checker.check("compare")["matched"] is True
    assert model.model.norm.weight[0] == -59


def test_a_checksum_takes_no_snapshot():
    checker = checker_of(Buffers(a=torch.ones(1)))
    checker.check("checksum")
    with pytest.raises(WeightsError):
        checker.check("compare")


def test_added_removed_and_changed_tensors_are_named():
    model = Buffers(a=torch.zeros(4), b=torch.zeros(1), c=torch.zeros(2))
    checker = checker_of(model)
    checker.check("snapshot")
    model.a = torch.zeros(2, 2)
    model.c = torch.zeros(1, dtype=torch.float64)
    del model.b
    model.register_buffer("d", torch.zeros(1))
    checker._target = LiveTensors(model)
    comparison = checker.check("compare")
    assert (comparison["matched"], comparison["missing"], comparison["unexpected"]) == (
        False,
        ["b"],
        ["d"],
    )
    assert comparison["changed"] == ["a", "c"]


def test_an_unknown_action_is_refused_with_the_known_ones():
    with pytest.raises(WeightsError) as caught:
        checker_of(nn.Module()).check("x")
    assert str(caught.value) == (
        "Unsupported weights_checker action 'x'; expected snapshot, reset_tensors, compare, or "
        "checksum"
    )
