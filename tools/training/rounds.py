"""Rounds: train, sync, verify; each with a result of one line.

A round is good if the sync succeeded and every replica behind the endpoint reports the digest of
the trainer's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tools.training.endpoint import Endpoint
from tools.training.faults import Fault, TwoAtOnce
from tools.training.learner import QUESTION, Learner
from tools.training.sync import VLLM, Sync, Synced, SyncOptions
from tools.training.transfer import Transfer, TransferOptions

HEAD = ("ROUND", "LOSS", "MB", "SECS", "GB/S", "VERSION", "CHECKSUMS", "ANSWER")
WIDTHS = (5, 7, 6, 6, 5, 8, 19, 0)
ANSWER_SHOWN = 36
BEFORE_SECS = 5.0  # a replica that was left paused doesn't answer; the first sync fixes that


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round.

    `version` and `answer` are the endpoint's after it, `why` is the first cause of a failure.
    `gb_per_sec` counts each byte once, regardless of the number of replicas.
    """

    number: int
    loss: float | None
    nbytes: int
    secs: float
    gb_per_sec: float
    version: str
    checksums: Mapping[str, str]
    own_checksum: str
    answer: str
    why: str = ""

    @property
    def good(self) -> bool:
        return not self.why

    def row(self) -> str:
        cells = (
            str(self.number),
            "-" if self.loss is None else f"{self.loss:.3f}",
            f"{self.nbytes / 1e6:.1f}",
            f"{self.secs:.2f}",
            f"{self.gb_per_sec:.2f}",
            self.version or "-",
            self._compared(),
            _short(self.answer),
        )
        return shown(cells)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.good}

    def _compared(self) -> str:
        found = list(self.checksums.values())
        same = found.count(self.own_checksum)
        words = f"{len(found)} equal" if same == len(found) else f"{same} of {len(found)} equal"
        return f"{words} {self.own_checksum[:6]}"


def shown(cells: tuple[str, ...]) -> str:
    pairs = zip(cells, WIDTHS, strict=True)
    return "  ".join(f"{cell:<{width}}" for cell, width in pairs).rstrip()


class Training:
    """All rounds of one run."""

    def __init__(self, endpoint: Endpoint, learner: Learner, options: SyncOptions) -> None:
        self._endpoint = endpoint
        self._learner = learner
        self._options = options
        self._transfer = Transfer(endpoint, _transfer_options(options))

    def close(self) -> None:
        """Leave the group that is kept between rounds."""
        self._transfer.close()

    def before(self) -> Round:
        """The endpoint's version and answer before the first sync."""
        answer, version = self._endpoint.ask(QUESTION, BEFORE_SECS)
        own, sums = self._learner.checksum(), self._endpoint.checksums(self._learner.checksum)
        return Round(0, None, 0, 0.0, 0.0, version, sums, own, answer)

    def _sync(self, label: str, fault: Fault) -> Synced:
        if self._options.form == VLLM:
            return self._transfer.sync(self._learner.named(), label)
        return Sync(self._endpoint, self._learner.named(), label, self._options, fault).run()

    def round(self, number: int, fault: Fault) -> Round:
        loss = self._learner.learn()
        label = f"step-{number}"
        synced = self._sync(label, fault)
        own, sums = self._learner.checksum(), self._endpoint.checksums(self._learner.checksum)
        answer, version = self._endpoint.ask(QUESTION)
        moved = synced.nbytes if synced.ok else 0
        return Round(
            number,
            loss,
            moved,
            synced.secs,
            moved / synced.moved_secs / 1e9 if synced.moved_secs else 0.0,
            version,
            sums,
            own,
            answer,
            synced.why or _checksum_difference(own, sums) or _second_trainer_error(fault),
        )


def _transfer_options(options: SyncOptions) -> TransferOptions:
    packed = options.bucket_bytes if options.load_format else 0
    return TransferOptions(
        pause_mode=options.pause_mode, packed_bytes=packed, timeout_secs=options.timeout_secs,
        host=options.host,
    )  # fmt: skip


def _checksum_difference(own: str, checksums: Mapping[str, str]) -> str:
    others = [name for name, found in checksums.items() if found != own]
    return f"other weights than the trainer's at {', '.join(others)}" if others else ""


def _second_trainer_error(fault: Fault) -> str:
    """The error if a second trainer was not refused, else ""."""
    answer = fault.answer if isinstance(fault, TwoAtOnce) else None
    return "the second trainer was let in" if answer is not None and answer.ok else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ANSWER_SHOWN else f"{line[:ANSWER_SHOWN]}…"
