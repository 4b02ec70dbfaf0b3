"""Whether replicas hold the same weights, by what their checkers say (api-server.md 3, 9.1).

Two workers can be compared where both name their ranks alike (then rank by rank), or where both
name a digest over the gathered whole tensors. Engines of two kinds hash differently: their digests
are never compared. Invariant: `mismatched` holds nobody who was compared with nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_proxy.admin_ops.results import WorkerResult

OMNI, SGLANG = "omni", "sglang"


@dataclass(frozen=True, slots=True)
class Digest:
    """`ranks`: a checksum per rank, stage by stage; `whole`: one over whole tensors, or ""."""

    kind: str
    ranks: tuple[str, ...]
    whole: str = ""

    def comparable(self, other: Digest) -> bool:
        alike = len(self.ranks) == len(other.ranks) > 0 or bool(self.whole and other.whole)
        return self.kind == other.kind and alike

    def agrees(self, other: Digest) -> bool:
        if len(self.ranks) == len(other.ranks) > 0:
            return self.ranks == other.ranks
        return self.whole == other.whole


@dataclass(frozen=True, slots=True)
class Verdict:
    """Worker URLs, and `unverified` with the reason why nothing could be compared.

    `whole`: the digest over whole tensors that all of `checked` have, "" where there is none.
    """

    checked: tuple[str, ...] = ()
    unverified: Mapping[str, str] | None = None
    mismatched: tuple[str, ...] = ()
    checksums: Mapping[str, str] | None = None
    whole: str = ""

    def told(self) -> dict[str, object]:
        reasons = self.unverified or {}
        return {
            "checked": list(self.checked),
            "unverified": list(reasons),
            "mismatched": list(self.mismatched),
            "reasons": dict(reasons),
            "checksums": dict(self.checksums or {}),
        }


def digest_of(answer: WorkerResult) -> Digest | str:
    """The digest in a checker's answer to `checksum`, or why there is none."""
    if not answer.success:
        return f"its checker failed: {answer.why}"
    body = answer.body
    if isinstance(body, dict):
        for found in (_omni(body), _sglang(body)):
            if found is not None:
                return found
    return "its checker names no checksum"


def compare(answers: Mapping[str, WorkerResult]) -> Verdict:
    """By worker URL. The largest group that agrees is right; of two as large nobody is."""
    return verdict_on({url: digest_of(answer) for url, answer in answers.items()})


def verdict_on(told: Mapping[str, Digest | str]) -> Verdict:
    """As `compare`, of what each told: its digest, or why there is none."""
    digests = {url: found for url, found in told.items() if isinstance(found, Digest)}
    unverified = {url: found for url, found in told.items() if isinstance(found, str)}
    groups = _groups(digests)
    mismatched = {
        url
        for group in groups
        for other in groups
        if other is not group and _comparable(group, other, digests) and len(other) >= len(group)
        for url in group
    }
    for group in groups:
        rivals = [other for other in groups if other is not group]
        alone = len(group) == 1 < len(told)
        if alone and not any(_comparable(group, other, digests) for other in rivals):
            unverified[group[0]] = "no other worker's checksum can be compared with it"
    checked = tuple(url for url in digests if url not in mismatched and url not in unverified)
    sums = {url: digest.whole or "/".join(digest.ranks) for url, digest in digests.items()}
    wrong = tuple(url for url in digests if url in mismatched)
    wholes = {digests[url].whole for url in checked}
    whole = wholes.pop() if len(wholes) == 1 else ""
    return Verdict(checked, unverified, wrong, sums, whole)


def _groups(digests: Mapping[str, Digest]) -> list[list[str]]:
    """Who agrees with whom, directly or over others."""
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


def _omni(body: Mapping[str, object]) -> Digest | None:
    ranks: list[list[str]] = []
    whole: list[str] = []
    for stage in sorted(_rows(body.get("results")), key=lambda stage: str(stage.get("stage"))):
        told = stage.get("data")
        if not isinstance(told, dict) or told.get("skipped") or told.get("unsupported"):
            continue
        ranks.append(_ranks_of(told))
        whole.append(_text(told.get("full_checksum")))
    by_rank = tuple(each for stage in ranks for each in stage) if all(ranks) else ()
    digest = Digest(OMNI, by_rank, "/".join(whole) if all(whole) else "")
    return digest if digest.ranks or digest.whole else None


def _ranks_of(told: Mapping[str, object]) -> list[str]:
    """Rank by rank where there are several; [] where one of them names none."""
    found = []
    for row in sorted(_rows(told.get("rank_results")), key=_rank):
        inner = row.get("data")
        found.append(_text(inner.get("per_gpu_checksum")) if isinstance(inner, dict) else "")
    found = found or [_text(told.get("per_gpu_checksum"))]
    return found if all(found) else []


def _sglang(body: Mapping[str, object]) -> Digest | None:
    found = tuple(_text(row.get("per_gpu_checksum")) for row in _rows(body.get("ranks")))
    return Digest(SGLANG, found) if found and all(found) else None


def _rank(row: Mapping[str, object]) -> int:
    rank = row.get("rank")
    return rank if isinstance(rank, int) else 0


def _rows(value: object) -> list[dict[str, object]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
