"""What workers say of their weights: the label of their version, the checksums of their tensors.

Invariant: nothing is taken from what a caller asked for; a worker that does not tell has no label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omni_proxy.control.agreement import Verdict, compare
from omni_proxy.control.model_info import version_of
from omni_proxy.control.outcomes import WorkerAnswer
from omni_proxy.fleet.worker import Worker
from omni_proxy.watch.calls import Call
from omni_proxy.weights.calling import ANSWER_BYTES, call_all

LABEL_SECS = 30.0
# The second needs no key and is what older engines have; the third is vLLM's.
LABEL_PATHS = ("/model_info", "/get_model_info", "/weight_info")
CHECKSUM = b'{"action": "checksum"}'


async def labels_of(
    workers: Sequence[Worker], headers: Mapping[str, str]
) -> dict[Worker, str | None]:
    """The weight version of each; None where it tells none."""
    labels: dict[Worker, str | None] = dict.fromkeys(workers)
    left = list(workers)
    for path in LABEL_PATHS:
        call = Call("GET", path, headers=headers, timeout_secs=LABEL_SECS)
        answers = await call_all(left, call)
        for worker, answer in zip(left, answers, strict=True):
            labels[worker] = version_of(answer.body) if answer.success else None
        # Who could not be reached will not be for the other path.
        left = [w for w, answer in zip(left, answers, strict=True) if answer.refused]
    return labels


async def ask_checksums(
    workers: Sequence[Worker], headers: Mapping[str, str], timeout_secs: float
) -> list[WorkerAnswer]:
    call = Call(
        "POST",
        "/weights_checker",
        CHECKSUM,
        headers={**headers, "content-type": "application/json"},
        timeout_secs=timeout_secs,
        max_bytes=ANSWER_BYTES,
    )
    return await call_all(workers, call)


async def compare_checksums(
    workers: Sequence[Worker], headers: Mapping[str, str], timeout_secs: float
) -> Verdict:
    answers = await ask_checksums(workers, headers, timeout_secs)
    return compare({answer.worker: answer for answer in answers})
