"""Plans of the tensors that a trainer announces: names, dtypes, shapes, and their batching.

Pure: no torch. Invariant: a `TensorPlan` is consistent: known dtypes, valid shapes, unique names,
offsets at which a view may start. Whether enough memory is free is not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

FLATTENED: Final = "flattened_bucket"
# Transports with one broadcast per message, which is also the default.
BROADCASTS: Final = ("nccl_broadcast", "nccl", "gloo_broadcast", "gloo")

# Bytes per element, by torch's names without "torch.".
ITEM_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
MAX_DIMENSIONS: Final = 64  # torch's own bound
MAX_ELEMENTS: Final = 1 << 56  # strides of anything larger may overflow inside torch
# Alignment of a tensor that has its own message: valid for a view of any dtype.
ALIGNMENT_BYTES: Final = 64

Announced = tuple[str, str, Sequence[int]]


class GroupError(Exception):
    """A weights-update group refused a request or failed; the text is for the trainer.

    `group_dropped`: the group no longer exists and has to be initialised again.
    """

    def __init__(self, message: str, *, group_dropped: bool = False) -> None:
        super().__init__(message)
        self.group_dropped = group_dropped


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One announced tensor; `dtype` without "torch."."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BroadcastMessage:
    """One broadcast: its location in the block. `what`: its content, for error texts."""

    what: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The tensors and messages of one receive. `offsets`: start of each tensor in the block."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    messages: tuple[BroadcastMessage, ...]
    block_bytes: int


def parse_specs(names: object, dtypes: object, shapes: object) -> list[Announced]:
    """Merges the three parallel lists of a request. Raises GroupError if they don't match."""
    lists = {"names": names, "dtypes": dtypes, "shapes": shapes}
    for key, value in lists.items():
        if not isinstance(value, list | tuple):
            raise GroupError(f"{key} must be a list, not {type(value).__name__}")
    if len({len(value) for value in lists.values() if isinstance(value, list | tuple)}) > 1:
        counts = ", ".join(
            f"{len(value)} {key}" for key, value in lists.items() if isinstance(value, list | tuple)
        )
        raise GroupError(f"names, dtypes and shapes must have the same length: {counts}")
    assert isinstance(names, list | tuple)
    assert isinstance(dtypes, list | tuple)
    assert isinstance(shapes, list | tuple)
    return list(zip(names, dtypes, shapes, strict=True))


def parse_plans(body: Mapping[str, Any], *, dense: bool = False) -> tuple[TensorPlan, ...]:
    """One plan per announced bucket of a prepare or a single-phase update.

    Accepts both forms: `buckets`, each with names, dtypes and shapes, or one bucket at the top
    level. Raises GroupError with the first error; ignores unknown keys. Source: note:two-phase 1.3
    and 1.5.
    """
    _require_broadcast(body.get("transport"))
    buckets = _buckets(body)
    _require_count(body.get("num_buckets"), len(buckets))
    plans: list[TensorPlan] = []
    bucket_of: dict[str, int] = {}
    for number, bucket in enumerate(buckets, start=1):
        where = f"bucket {number} of {len(buckets)}: " if len(buckets) > 1 else ""
        try:
            specs = parse_specs(*(bucket.get(key) for key in ("names", "dtypes", "shapes")))
            plan = make_plan(specs, body.get("load_format"), dense=dense)
        except GroupError as error:
            raise GroupError(f"{where}{error}") from None
        for tensor in plan.tensors:
            if (first := bucket_of.setdefault(tensor.name, number)) != number:
                raise GroupError(f"{where}tensor {tensor.name!r} is in bucket {first} already")
        plans.append(plan)
    return tuple(plans)


def _require_broadcast(transport: object) -> None:
    if transport not in (None, *BROADCASTS):
        raise GroupError(
            f"transport {transport!r} is not supported: use one of {', '.join(BROADCASTS)}, or "
            "leave it out"
        )


def _buckets(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    buckets = body.get("buckets")
    if not buckets and body.get("names") is not None:
        return [body]
    if buckets is None or buckets == []:
        raise GroupError("nothing is announced: neither buckets nor names, dtypes and shapes")
    if not isinstance(buckets, list | tuple):
        raise GroupError(f"buckets must be a list, not {type(buckets).__name__}")
    for number, bucket in enumerate(buckets, start=1):
        if not isinstance(bucket, Mapping):
            raise GroupError(
                f"bucket {number} of {len(buckets)} must be an object with names, dtypes and "
                f"shapes, not {bucket!r}"
            )
    return list(buckets)


def _require_count(num_buckets: object, announced: int) -> None:
    if num_buckets is None:
        return
    if not isinstance(num_buckets, int) or isinstance(num_buckets, bool):
        raise GroupError(f"num_buckets must be an integer, not {num_buckets!r}")
    if num_buckets != announced:
        raise GroupError(f"num_buckets is {num_buckets}, but {announced} are announced")


def merge_plans(plans: Sequence[TensorPlan], starts: Sequence[int] | None = None) -> TensorPlan:
    """All buckets as one plan: bucket i's block starts at `starts[i]`, by default contiguous."""
    if starts is None:
        starts = aligned_starts([plan.block_bytes for plan in plans])
    tensors: list[TensorSpec] = []
    offsets: list[int] = []
    messages: list[BroadcastMessage] = []
    end = 0
    for plan, start in zip(plans, starts, strict=True):
        tensors += plan.tensors
        offsets += [start + offset for offset in plan.offsets]
        messages += [BroadcastMessage(m.what, start + m.offset, m.nbytes) for m in plan.messages]
        end = max(end, start + plan.block_bytes)
    return TensorPlan(tuple(tensors), tuple(offsets), tuple(messages), end)


def aligned_starts(sizes: Sequence[int]) -> list[int]:
    """Start offsets of contiguous blocks of these sizes, aligned."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        end = starts[-1] + size
    return starts


def make_plan(
    specs: Iterable[Announced], load_format: str | None = None, *, dense: bool = False
) -> TensorPlan:
    """The plan of these specs. Raises GroupError with the first invalid one.

    `dense` leaves no gaps between tensors, as in a file or a flattened bucket, so some tensors may
    be misaligned for a view.
    """
    if load_format not in (None, FLATTENED):
        raise GroupError(
            f"unknown load_format {load_format!r}: use {FLATTENED!r}, or none for one broadcast "
            "per tensor"
        )
    tensors = tuple(_parse_tensor(name, dtype, shape) for name, dtype, shape in specs)
    if not tensors:
        raise GroupError("no tensor is announced: names, dtypes and shapes are empty")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise GroupError(f"tensor {tensor.name!r} is announced twice")
        seen.add(tensor.name)
    if load_format == FLATTENED:
        return _one_flat_message(tensors)
    return _one_message_each(tensors, 1 if dense else ALIGNMENT_BYTES)


def _parse_tensor(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(name, str) or not name:
        raise GroupError(f"a tensor's name must be a non-empty string, not {name!r}")
    bare = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if bare not in ITEM_BYTES:
        raise GroupError(
            f"tensor {name!r}: unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}"
        )
    dims = _parse_shape(name, shape)
    return TensorSpec(name, bare, dims, prod(dims) * ITEM_BYTES[bare])


def _parse_shape(name: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple):
        raise GroupError(f"tensor {name!r}: its shape must be a list of integers, not {shape!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise GroupError(f"tensor {name!r}: {len(shape)} dimensions, at most {MAX_DIMENSIONS}")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise GroupError(
                f"tensor {name!r}: a dimension must be an integer of 0 or more, not {size!r}"
            )
    # Empty dimensions count as 1, because torch computes strides from the other ones.
    if prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise GroupError(f"tensor {name!r}: shape {list(shape)} is larger than any memory")
    return tuple(shape)


def _one_message_each(tensors: tuple[TensorSpec, ...], alignment_bytes: int) -> TensorPlan:
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        start = -(-end // alignment_bytes) * alignment_bytes
        offsets.append(start)
        end = start + tensor.nbytes
    messages = tuple(
        BroadcastMessage(f"tensor {tensor.name!r}", offset, tensor.nbytes)
        for tensor, offset in zip(tensors, offsets, strict=True)
    )
    return TensorPlan(tensors, tuple(offsets), messages, end)


def _one_flat_message(tensors: tuple[TensorSpec, ...]) -> TensorPlan:
    """All tensors in one message, without padding between them (note:api-server 9.1)."""
    plan = _one_message_each(tensors, 1)
    label = f"the flattened bucket of {len(tensors)} tensors from {tensors[0].name!r} on"
    message = BroadcastMessage(label, 0, plan.block_bytes)
    return TensorPlan(tensors, plan.offsets, (message,), plan.block_bytes)
