"""Loads safetensors files: headers first, then the tensors' bytes, possibly in steps.

Invariant: a tensor that does not fit the model is refused before any tensor byte is read; live
tensors are not touched here. Files are read by several threads with a single copy, not mapped: if a
file is truncated while it is read, that is an error here; with a mapping, the process would get
SIGBUS. A file that is still being written is prefetched as far as its writer reports; an update
uses prefetched bytes only if it names the same file. They are dropped after KEEP_SECS.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from omni_proxy.process_group.tensor_plan import aligned_starts
from omni_proxy.replica.weights.live_tensors import (
    DERIVED_ENDINGS,
    LiveTensors,
    StagedTensors,
    TensorSignature,
    WeightsError,
)
from omni_proxy.replica.weights.stored_tensors import StoredTensors

# The work item of one thread: whole huge pages, and small enough to balance the threads.
SHARE_BYTES: Final = 8 << 20

# The largest buffer that is kept for the next read: allocating it again costs more than a copy.
KEEP_BYTES: Final = 1 << 30

# A file descriptor, the offset in the file, and the memory to read into.
FilePiece = tuple[int, int, memoryview]


class TruncatedFile(Exception):
    """A file has fewer bytes than its header declares."""


def allocate_read_buffer(nbytes: int) -> Tensor:
    """New flat uint8 memory, in huge pages if the system has them."""
    pages: Any = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))[:nbytes]


class ReadBufferPool:
    """Keeps the buffer of the last read while it is unused. Safe from any thread."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._kept: deque[Tensor] = deque()

    def take(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        """Flat uint8 memory (content undefined), and the function that returns it to the pool."""
        try:
            block = self._kept.pop()
        except IndexError:
            block = None
        if block is None or block.nbytes < nbytes:
            block = allocate_read_buffer(nbytes)
        buffer: Tensor = block
        return buffer[:nbytes], lambda: self._back(buffer)

    def _back(self, block: Tensor) -> None:
        self._kept.clear()
        if block.nbytes <= self._keep_bytes:
            self._kept.append(block)


def tensor_memory(tensor: Tensor) -> memoryview:
    """The tensor's memory, to be read into."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def split_piece(piece: FilePiece, upto: int) -> tuple[FilePiece, FilePiece]:
    """The piece's parts before and after byte `upto` of its file; either may be empty."""
    descriptor, place, into = piece
    count = min(max(upto - place, 0), len(into))
    return (descriptor, place, into[:count]), (descriptor, place + count, into[count:])


def read_pieces(pieces: Iterable[FilePiece], threads: int) -> None:
    """Read every piece. Raises OSError, TruncatedFile."""
    shares = [share for piece in pieces for share in _shares(*piece)]
    threads = min(threads, max(len(shares), 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-read") as pool:
        for _ in pool.map(_read, shares):
            pass


def _shares(descriptor: int, place: int, into: memoryview) -> Iterator[FilePiece]:
    for start in range(0, len(into), SHARE_BYTES):
        yield descriptor, place + start, into[start : start + SHARE_BYTES]


def _read(piece: FilePiece) -> None:
    descriptor, place, into = piece
    while into:
        count = os.preadv(descriptor, [into], place)
        if not count:
            raise TruncatedFile
        place, into = place + count, into[count:]


EVERYTHING: Final = sys.maxsize  # larger than any file


@dataclass(frozen=True, slots=True)
class FileSelection:
    """A file, the tensor names to load from it (None: all), and its SHA-256 if one is given."""

    path: Path
    names: tuple[str, ...] | None = None
    sha256: str | None = None

    def names_in(self, stored: StoredTensors) -> list[str]:
        """The names to load from `stored`; raises WeightsError if there are none."""
        names = stored.names if self.names is None else list(self.names)
        if not names:
            raise WeightsError(f"{stored.title} holds no tensor")
        return names


@dataclass(frozen=True, slots=True)
class _SelectedTensor:
    """A tensor to load from an open file."""

    name: str
    stored: StoredTensors
    form: TensorSignature

    def within(self, block: Tensor, start: int) -> Tensor:
        part = block[start : start + self.form.nbytes]
        return part.view(self.form.dtype).view(self.form.shape)

    def piece(self, tensor: Tensor) -> FilePiece:
        return self.stored.descriptor, self.stored.place(self.name), tensor_memory(tensor)


@dataclass(slots=True)
class _LoadBlock:
    """The buffer of all tensors that need no conversion; `unread` are its pieces not yet read."""

    give_back: Callable[[], None]
    tensors: dict[_SelectedTensor, Tensor] = field(default_factory=dict)
    unread: list[FilePiece] = field(default_factory=list)


class SafetensorsLoader:
    """Loads the selected tensors of some files; must be ended by `stage` or `forget`.

    As a context manager, it closes the files.
    """

    def __init__(self, target: LiveTensors, rooms: ReadBufferPool) -> None:
        self._target = target
        self._rooms = rooms
        self._room: _LoadBlock | None = None
        self._files = ExitStack()
        self._sources: list[tuple[BufferedReader, FileSelection]] = []
        self._wanted: list[_SelectedTensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self._wanted]

    @property
    def unconverted(self) -> list[_SelectedTensor]:
        return [tensor for tensor in self._wanted if self._needs_no_conversion(tensor)]

    def open_file(self, part: FileSelection) -> None:
        """Opens a file and checks its tensors; raises OSError, WeightsError if one does not fit."""
        file = self._files.enter_context(part.path.open("rb"))
        stored = StoredTensors(file, str(part.path))
        staged = StagedTensors(self._target)
        for name in part.names_in(stored):
            form = stored.form(name)
            staged.check(name, form)
            if not name.endswith(DERIVED_ENDINGS):
                self._wanted.append(_SelectedTensor(name, stored, form))
        self._sources.append((file, part))

    def is_of(self, parts: Sequence[FileSelection]) -> bool:
        """Whether these paths name the open files, also after a rename. Raises OSError."""
        opened = [os.fstat(file.fileno()) for file, _ in self._sources]
        wanted = [part.path.stat() for part in parts if part.names is None and part.sha256 is None]
        return len(wanted) == len(parts) == len(opened) and all(
            map(os.path.samestat, opened, wanted)
        )

    def read(self, upto: int, threads: int) -> int:
        """Reads the block's bytes before offset `upto` of each file; returns how many remain.

        Raises WeightsError, and OSError from a file.
        """
        room_ = self._room = self._room or self._taken()
        halves = [split_piece(piece, upto) for piece in room_.unread]
        _fill([now for now, _ in halves], self._wanted, threads)
        room_.unread = [later for _, later in halves if later[2]]
        return sum(len(later[2]) for later in room_.unread)

    def stage(self) -> StagedTensors:
        """Reads the remaining bytes and stages all tensors; raises WeightsError, OSError."""
        cores = len(os.sched_getaffinity(0))
        try:
            for file, part in self._sources:
                _require_digest(file, part)
            self.read(EVERYTHING, cores)
        except (WeightsError, OSError):
            self.forget()
            raise
        room_, self._room = self._room, None
        assert room_ is not None
        staged = StagedTensors(self._target, room_.give_back)
        try:
            for selected in self._wanted:
                read_tensor = room_.tensors.pop(selected, None)
                staged.add(
                    selected.name, _alone(selected, cores) if read_tensor is None else read_tensor
                )
                del read_tensor
        except (WeightsError, OSError):
            room_.tensors.clear()
            staged.forget()
            raise
        return staged

    def forget(self) -> None:
        """Drops all bytes that were read."""
        room_, self._room = self._room, None
        if room_ is not None:
            room_.tensors.clear()
            room_.unread.clear()
            room_.give_back()

    def _taken(self) -> _LoadBlock:
        places, nbytes = _side_by_side(self.unconverted)
        block, give_back = self._rooms.take(nbytes)
        tensors = {tensor: tensor.within(block, start) for tensor, start in places.items()}
        return _LoadBlock(give_back, tensors, [tensor.piece(tensors[tensor]) for tensor in places])

    def _needs_no_conversion(self, wanted: _SelectedTensor) -> bool:
        """Whether the tensor needs no conversion: same dtype and shape, and on the CPU."""
        live = self._target.live(wanted.name)
        return (
            TensorSignature(live.dtype, tuple(live.shape)) == wanted.form
            and live.device.type == "cpu"
        )


def _side_by_side(wanted: Sequence[_SelectedTensor]) -> tuple[dict[_SelectedTensor, int], int]:
    """The offset of each tensor in one block of memory, and the block's size in bytes."""
    starts = aligned_starts([tensor.form.nbytes for tensor in wanted])
    end = starts[-1] + wanted[-1].form.nbytes if wanted else 0
    return dict(zip(wanted, starts, strict=True)), end


def _alone(wanted: _SelectedTensor, threads: int) -> Tensor:
    tensor = wanted.within(allocate_read_buffer(wanted.form.nbytes), 0)
    _fill([wanted.piece(tensor)], [wanted], threads)
    return tensor


def _fill(pieces: Sequence[FilePiece], wanted: Sequence[_SelectedTensor], threads: int) -> None:
    try:
        read_pieces(pieces, threads)
    except TruncatedFile:
        titles = ", ".join(dict.fromkeys(tensor.stored.title for tensor in wanted))
        raise WeightsError(f"{titles} ended in the middle of a tensor") from None


def _require_digest(file: BufferedReader, part: FileSelection) -> None:
    if part.sha256 is not None:
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != part.sha256.lower():
            raise WeightsError(f"{part.path} has the SHA-256 {digest}, not the expected one")


# How long a prefetched file is kept if no update uses it: its writer may have failed.
KEEP_SECS: Final = 60.0
# Bytes read per step, after which an update may take over; one thread, to leave cores to the model.
STEP_BYTES: Final = 64 << 20
THREADS: Final = 1


class FilePrefetcher:
    """Prefetches one file, the latest. Thread-safe; an update waits for at most one step."""

    def __init__(self, keep_secs: float = KEEP_SECS) -> None:
        self._keep_secs = keep_secs
        self._lock = threading.Lock()
        self._wanted = threading.Event()  # set by an update, which reads the rest on all cores
        self._path: Path | None = None
        self._loading: SafetensorsLoader | None = None
        self._timer: threading.Timer | None = None

    def read(self, path: Path, nbytes: int, opened: Callable[[], SafetensorsLoader]) -> int:
        """Reads up to byte `nbytes`, before which the file no longer changes.

        Returns how many bytes can be prefetched in total, perhaps 0. Raises WeightsError, and
        OSError from the file; nothing is kept then.
        """
        with self._lock:
            if self._path != path:
                self._drop()
                self._path, self._loading = path, opened()
            loading = self._loading
            assert loading is not None
            try:
                for step in range(STEP_BYTES, nbytes + STEP_BYTES, STEP_BYTES):
                    if self._wanted.is_set():
                        break
                    loading.read(min(step, nbytes), THREADS)
            except (WeightsError, OSError):
                self._drop()
                raise
            self._restart_timer()
            return sum(tensor.form.nbytes for tensor in loading.unconverted)

    def take(self, parts: Sequence[FileSelection]) -> SafetensorsLoader | None:
        """The loader of exactly these files, which the caller must close, or None.

        A loader of other files is dropped.
        """
        self._wanted.set()
        try:
            with self._lock:
                loading = self._loading
                if loading is None or not loading.is_of(parts):
                    self._drop()
                    return None
                self._path = self._loading = None
                self._restart_timer()
                return loading
        finally:
            self._wanted.clear()

    def _restart_timer(self) -> None:
        """Restarts the expiry timer if anything is kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loading is not None:
            self._timer = threading.Timer(self._keep_secs, self._expire, [self._loading])
            self._timer.daemon = True
            self._timer.start()

    def _expire(self, loading: SafetensorsLoader) -> None:
        with self._lock:
            if self._loading is loading:
                self._drop()

    def _drop(self) -> None:
        loading, self._loading, self._path = self._loading, None, None
        self._restart_timer()
        if loading is not None:
            with loading:
                loading.forget()
