"""A model's live tensors by name, and staged new values that replace them together.

Invariant: a tensor that does not fit is refused by name before any live tensor is written; a failed
`apply` restores what it had written. Tensors are written in place, because views of them exist: by
copy or by swap, on all cores, if they are plain tensors in host memory. A swap needs no memory for
a third set of tensors: the old values move into the memory of the new ones and can be restored. A
failed swap changes nothing, because moved parts are moved back with a buffer that was allocated
before the first move; a failed `copy_tensors` may have written some tensors.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from omni_proxy.replica.models.llama import TIED_NAMES
from omni_proxy.replica.models.shard import Shard

# The size of the three buffers that a swap moves: together they about fit into a core's cache.
PIECE_BYTES: Final = 1 << 20
# The work item of one thread: small enough to balance the cores, large enough to pay off.
SHARE_BYTES: Final = 16 << 20

Pair: TypeAlias = tuple[Tensor, Tensor]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def can_swap(pairs: Iterable[Pair]) -> list[bool]:
    """For each (live, new), whether it can be swapped; never if two tensors share memory."""
    seen: set[int] = set()
    results = []
    for live, new in pairs:
        places = {live.data_ptr(), new.data_ptr()} if _plain(live) and _plain(new) else set()
        apart = len(places) == 2 and not places & seen
        results.append(apart and live.dtype == new.dtype and live.shape == new.shape)
        seen |= places
    return results


def swap_tensors(pairs: Iterable[Pair]) -> None:
    """Swaps all pairs or none; each must be `can_swap`. Raises MemoryError or RuntimeError."""
    spare = np.empty(PIECE_BYTES, np.uint8)
    moved: list[tuple[Bytes, Bytes]] = []

    def move(one: Bytes, other: Bytes) -> None:
        room = np.empty(min(PIECE_BYTES, one.nbytes), np.uint8)
        _exchange(one, other, room)
        moved.append((one, other))

    try:
        _each_share(pairs, move)
    except Exception:  # no memory or no thread for one of them; all threads have stopped
        for one, other in moved:
            _exchange(one, other, spare)
        raise


def copy_tensors(pairs: Iterable[Pair]) -> None:
    """Copies the new values over the live ones; each pair must be `can_swap`."""
    _each_share(pairs, np.copyto)


def _plain(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.is_contiguous() and tensor.numel() > 0


def _each_share(pairs: Iterable[Pair], move: Callable[[Bytes, Bytes], None]) -> None:
    shares = [share for pair in pairs for share in _shares(*pair)]
    cores = min(len(os.sched_getaffinity(0)), max(len(shares), 1))
    with ThreadPoolExecutor(cores, thread_name_prefix="swap") as pool:
        for _ in pool.map(move, *zip(*shares, strict=True)) if shares else ():
            pass


def _shares(live: Tensor, new: Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    one, other = _bytes(live), _bytes(new)
    for start in range(0, one.nbytes, SHARE_BYTES):
        yield one[start : start + SHARE_BYTES], other[start : start + SHARE_BYTES]


def _bytes(tensor: Tensor) -> Bytes:
    flat: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def _exchange(one: Bytes, other: Bytes, room: Bytes) -> None:
    for start in range(0, one.nbytes, PIECE_BYTES):
        a, b = one[start : start + PIECE_BYTES], other[start : start + PIECE_BYTES]
        kept = room[: a.nbytes]
        np.copyto(kept, a)
        np.copyto(a, b)
        np.copyto(b, kept)


# Older checkpoints store it, but every loader computes it.
DERIVED_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
NAMED_AT_MOST = 5

_REPR = reprlib.Repr()


class WeightsError(Exception):
    """The sent tensors cannot become this model's weights; no live tensor was touched."""


class ApplyError(Exception):
    """The swap failed and was undone: every live tensor has its old value."""


class DamagedWeightsError(Exception):
    """The swap failed and could not be undone: live tensors are a mix of old and new values."""


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def short_repr(value: object) -> str:
    """The value's repr, truncated: a request may contain millions of characters."""
    return _REPR.repr(value)


def list_some(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:NAMED_AT_MOST])
    more = len(names) - NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown


class LiveTensors:
    """Parameters, then buffers, each once under its first name; `aliases` are other names.

    If the model is sharded over processes (it has a `shard`), whole tensors are accepted and this
    rank's part of them is kept.
    """

    def __init__(self, model: nn.Module, aliases: Mapping[str, str] = TIED_NAMES) -> None:
        self._tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self._tensors[name] = tensor
        self._aliases = {
            alias: name
            for alias, name in aliases.items()
            if name in self._tensors and alias not in self._tensors
        }
        self._shard: Shard | None = getattr(model, "shard", None)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def own_name(self, name: str) -> str:
        """The canonical name of a tensor; raises WeightsError if there is none."""
        own = self._aliases.get(name, name)
        if own not in self._tensors:
            raise WeightsError(f"the model has no tensor {short_repr(name)}")
        return own

    def live(self, name: str) -> Tensor:
        """The live tensor; raises WeightsError if the model has none of this name."""
        return self._tensors[self.own_name(name)]

    def check(self, name: str, form: TensorSignature) -> None:
        """Raises WeightsError if such a tensor does not fit the model."""
        live = self.live(name)
        shape = self._whole_shape(name, live)
        if shape != form.shape:
            raise WeightsError(
                f"{name} has the shape {short_repr(list(form.shape))}; "
                f"the model's has {list(shape)}"
            )
        floating = form.dtype.is_floating_point and live.dtype.is_floating_point
        if form.dtype != live.dtype and not floating:
            raise WeightsError(f"{name} is of {form.dtype}, which cannot become {live.dtype}")

    def _whole_shape(self, name: str, live: Tensor) -> tuple[int, ...]:
        if self._shard is None:
            return tuple(live.shape)
        return self._shard.whole_shape(self.own_name(name), live.shape)

    def require_all(self, names: Iterable[str]) -> None:
        """Raises WeightsError if a tensor of the model is not among `names`."""
        sent = {self._aliases.get(name, name) for name in names}
        missing = [name for name in self._tensors if name not in sent]
        if missing:
            raise WeightsError(
                f"{len(missing)} of the model's {len(self._tensors)} tensors are missing: "
                f"{list_some(missing)}; to change a part on purpose, name it in a manifest"
            )

    @property
    def split(self) -> bool:
        """Whether this process has only a shard of the model."""
        return self._shard is not None

    def part_of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor: the tensor itself, or a copy of a part."""
        if self._shard is None or self._shard.slice_of(self.own_name(name)) is None:
            return tensor
        return self._shard.shard_of(self.own_name(name), tensor).clone()


class StagedTensors:
    """New values, validated and converted to the live tensors' dtypes, not applied yet.

    `give_back` is called when no value is referenced any more, to release their memory.
    """

    def __init__(self, target: LiveTensors, give_back: Callable[[], None] | None = None) -> None:
        self._target = target
        self._new: dict[str, Tensor] = {}
        self._old: dict[str, Tensor] = {}
        self._lenders = [] if give_back is None else [give_back]

    def __len__(self) -> int:
        return len(self._new)

    def check(self, name: str, form: TensorSignature) -> None:
        """Raises WeightsError if `add` would raise it for such a tensor."""
        if not name.endswith(DERIVED_ENDINGS):
            self._target.check(name, form)

    def add(self, name: str, tensor: Tensor) -> None:
        """Stages a tensor, without a copy if it has the right dtype; raises WeightsError."""
        if name.endswith(DERIVED_ENDINGS):
            return
        target = self._target
        target.check(name, TensorSignature(tensor.dtype, tuple(tensor.shape)))
        own, live = target.own_name(name), target.live(name)
        part = target.part_of(name, tensor.detach())
        new = part.to(device=live.device, dtype=live.dtype)
        if own in self._new and not torch.equal(self._new[own], new):
            raise WeightsError(f"{name} occurs twice, with different values")
        self._new[own] = new

    def update(self, later: StagedTensors) -> None:
        """Merges the values of `later`, which replace values of the same tensors."""
        self._new |= later._new
        self._lenders += later._lenders

    def apply(self) -> None:
        """Writes all values into the live tensors; raises ApplyError, DamagedWeightsError.

        The old values are kept for `undo` until `forget`.
        """
        old = self._old
        try:
            with torch.no_grad():
                self._exchange()
                for name in list(self._new):
                    live = self._target.live(name)
                    old[name] = live.clone()
                    # One tensor at a time, to bound memory: each new value is freed after its copy.
                    live.copy_(self._new.pop(name))
        except Exception as error:  # of any kind: the old weights must be restored
            self.undo()
            raise ApplyError(f"{type(error).__name__}: {error}") from error

    def apply_without_rollback(self) -> None:
        """Like `apply`, without keeping the old values; only if no later step can fail."""
        pairs = [(self._target.live(name), new) for name, new in self._new.items()]
        if all(can_swap(pairs)):
            try:
                copy_tensors(pairs)
            except Exception as error:  # such as no thread: some tensors may have been written
                raise DamagedWeightsError(f"{type(error).__name__}: {error}") from error
        else:
            self.apply()

    def _exchange(self) -> None:
        """Swaps the tensors that are in host memory with the live ones."""
        names = list(self._new)
        pairs = [(self._target.live(name), self._new[name]) for name in names]
        quick = can_swap(pairs)
        swap_tensors(pair for pair, may in zip(pairs, quick, strict=True) if may)
        for name, may in zip(names, quick, strict=True):
            if may:
                self._old[name] = self._new.pop(name)

    def undo(self) -> None:
        """Restores the values that `apply` replaced; raises DamagedWeightsError."""
        try:
            with torch.no_grad():
                for name, values in self._old.items():
                    self._target.live(name).copy_(values)
        except Exception as error:  # the device is probably lost
            raise DamagedWeightsError(f"{type(error).__name__}: {error}") from error

    def forget(self) -> None:
        """Frees all memory; slow, so not for the scheduler's thread."""
        for tensors in (self._new, self._old):
            while tensors:
                tensors.popitem()
        while self._lenders:
            self._lenders.pop()()
