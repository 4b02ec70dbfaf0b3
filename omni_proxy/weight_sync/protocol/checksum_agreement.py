"""Compares the checksums that workers report for their weights (note:api-server 3, 9.1). Pure.

Two workers are comparable if both report the same number of ranks (compared rank by rank), or if
both report a digest over the gathered, whole tensors. Different kinds of engines hash differently,
so their digests are never compared. Invariant: a worker that was compared with no other worker is
never in `mismatched`. `Verdict.to_dict` is the `verification` in responses to weight calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni_proxy.admin_ops.results import WorkerResult

OMNI, SGLANG, VLLM = "omni", "sglang", "vllm"
# SHA-256 of no bytes: the checksum of every tensor that an engine has repacked, such as vLLM's
# linear layers on a CPU, whatever its values (note:real-engines 5.1).
EMPTY: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Digest:
    """Checksums of a worker. `ranks`: one per rank, stage by stage.

    `whole`: a digest over whole tensors, or "". `partial`: why equal digests don't prove equal
    weights (different ones always prove different weights); "" if they do.
    """

    kind: str
    ranks: tuple[str, ...]
    whole: str = ""
    partial: str = ""

    def comparable(self, other: Digest) -> bool:
        alike = len(self.ranks) == len(other.ranks) > 0 or bool(self.whole and other.whole)
        return self.kind == other.kind and alike

    def agrees(self, other: Digest) -> bool:
        if len(self.ranks) == len(other.ranks) > 0:
            return self.ranks == other.ranks
        return self.whole == other.whole


@dataclass(frozen=True, slots=True)
class Verdict:
    """Worker URLs by result. `unverified` maps a URL to the reason why it could not be compared.

    `whole`: the digest over whole tensors that all `checked` workers have, or "".
    """

    checked: tuple[str, ...] = ()
    unverified: Mapping[str, str] | None = None
    mismatched: tuple[str, ...] = ()
    checksums: Mapping[str, str] | None = None
    whole: str = ""

    def to_dict(self) -> dict[str, object]:
        reasons = self.unverified or {}
        return {
            "checked": list(self.checked),
            "unverified": list(reasons),
            "mismatched": list(self.mismatched),
            "reasons": dict(reasons),
            "checksums": dict(self.checksums or {}),
        }


def parse_digest(result: WorkerResult) -> Digest | str:
    """The digest in a response to a checksum call, or the reason why there is none."""
    if not result.success:
        return f"its checker failed: {result.reason}"
    body = result.body
    if isinstance(body, dict):
        for digest in (_parse_omni(body), _parse_sglang(body), _parse_vllm(body)):
            if digest is not None:
                return digest
    return "its checker reports no checksum"


def compare_answers(results: Mapping[str, WorkerResult]) -> Verdict:
    """Compare responses to checksum calls, by worker URL. The largest agreeing group is right.

    If two groups are equally large, all their workers are mismatched.
    """
    return compare_digests({url: parse_digest(result) for url, result in results.items()})


def compare_digests(reports: Mapping[str, Digest | str]) -> Verdict:
    """Like `compare_answers`. `reports`: URL to a digest, or to the reason why there is none."""
    digests = {url: report for url, report in reports.items() if isinstance(report, Digest)}
    unverified = {url: report for url, report in reports.items() if isinstance(report, str)}
    groups = _agreeing_groups(digests)
    mismatched = {
        url
        for group in groups
        for other in groups
        if other is not group and _comparable(group, other, digests) and len(other) >= len(group)
        for url in group
    }
    for group in groups:
        rivals = [other for other in groups if other is not group]
        single = len(group) == 1 < len(reports)
        if single and not any(_comparable(group, other, digests) for other in rivals):
            unverified[group[0]] = "no other worker's checksum can be compared with it"
    for url, digest in digests.items():
        if digest.partial and url not in mismatched:
            unverified.setdefault(url, digest.partial)
    checked = tuple(url for url in digests if url not in mismatched and url not in unverified)
    sums = {url: digest.whole or "/".join(digest.ranks) for url, digest in digests.items()}
    mismatches = tuple(url for url in digests if url in mismatched)
    wholes = {digests[url].whole for url in checked}
    parts = wholes.pop() if len(wholes) == 1 else ""
    return Verdict(checked, unverified, mismatches, sums, parts)


def _agreeing_groups(digests: Mapping[str, Digest]) -> list[list[str]]:
    """Groups of workers that agree with each other, directly or through other workers."""
    groups: list[list[str]] = []
    for url, digest in digests.items():
        same = [g for g in groups if any(_same(digest, digests[other]) for other in g)]
        groups = [g for g in groups if g not in same]
        groups.append([*(member for g in same for member in g), url])
    return groups


def _same(one: Digest, other: Digest) -> bool:
    return one.comparable(other) and one.agrees(other)


def _comparable(one: list[str], other: list[str], digests: Mapping[str, Digest]) -> bool:
    return any(digests[a].comparable(digests[b]) for a in one for b in other)


def _parse_omni(body: Mapping[str, object]) -> Digest | None:
    """The response of the project's own replica: a row per stage, with checksums per rank."""
    ranks: list[list[str]] = []
    parts: list[str] = []
    for stage in sorted(_rows(body.get("results")), key=lambda stage: str(stage.get("stage"))):
        data = stage.get("data")
        if not isinstance(data, dict) or data.get("skipped") or data.get("unsupported"):
            continue
        ranks.append(_rank_checksums(data))
        parts.append(_text(data.get("full_checksum")))
    by_rank = tuple(checksum for stage in ranks for checksum in stage) if all(ranks) else ()
    digest = Digest(OMNI, by_rank, "/".join(parts) if all(parts) else "")
    return digest if digest.ranks or digest.whole else None


def _rank_checksums(data: Mapping[str, object]) -> list[str]:
    """One checksum per rank; [] if one of the ranks reports none."""
    checksums = []
    for row in sorted(_rows(data.get("rank_results")), key=_rank):
        inner = row.get("data")
        checksums.append(_text(inner.get("per_gpu_checksum")) if isinstance(inner, dict) else "")
    checksums = checksums or [_text(data.get("per_gpu_checksum"))]
    return checksums if all(checksums) else []


def _parse_sglang(body: Mapping[str, object]) -> Digest | None:
    checksums = tuple(_text(row.get("per_gpu_checksum")) for row in _rows(body.get("ranks")))
    return Digest(SGLANG, checksums) if checksums and all(checksums) else None


def _parse_vllm(body: Mapping[str, object]) -> Digest | None:
    """A checksum per tensor of each rank: "dp0:pp0:pcp0:tp0:NAME" to its SHA-256."""
    sums = body.get("checksums")
    if not isinstance(sums, dict) or not sums:
        return None
    ranks: dict[str, list[str]] = {}
    empty = 0
    for name in sorted(sums):
        rank, _, tensor = name.rpartition(":")
        ranks.setdefault(rank, []).append(f"{tensor}={sums[name]}")
        empty += sums[name] == EMPTY
    digests = tuple(
        hashlib.sha256("\n".join(lines).encode("utf-8", "replace")).hexdigest()
        for _, lines in sorted(ranks.items())
    )
    if empty:
        reason = f"its checker hashed nothing for {empty} of {len(sums)} tensors"
        return Digest(VLLM, digests, partial=reason)
    return Digest(VLLM, digests, digests[0] if len(digests) == 1 else "")


def _rank(row: Mapping[str, object]) -> int:
    rank = row.get("rank")
    return rank if isinstance(rank, int) else 0


def _rows(value: object) -> list[dict[str, object]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
