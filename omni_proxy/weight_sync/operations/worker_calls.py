"""The same call to many workers, all of them at once.

Invariant: nobody waits for another's answer to be asked: workers that join a group wait for each
other, so a bound on how many are asked at a time would be a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from omni_proxy.admin_ops.model_info import version_of
from omni_proxy.admin_ops.results import WorkerResult, parsed
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call, CallResult, broadcast, call_worker
from omni_proxy.weight_sync.protocol.checksum_agreement import Verdict, compare

ANSWER_BYTES = 64 * 1024 * 1024  # a checker names every tensor
Hear = Callable[[WorkerResult], None]


async def call_all(
    workers: Sequence[Worker], call: Call, hear: Hear = lambda _: None
) -> list[WorkerResult]:
    """In the order of the workers; `hear` gets each answer as it comes."""
    answers: dict[Worker, WorkerResult] = {}

    def on_result(result: CallResult) -> None:
        answers[result.worker] = answer = WorkerResult(
            result.worker.url, result.status, parsed(result.body), result.error, result.secs
        )
        hear(answer)

    await broadcast(workers, call, max_parallel=math.inf, on_result=on_result)
    return [answers[worker] for worker in workers]


def limit_secs(configured: float) -> float:
    """0 is none."""
    return configured or math.inf


# What workers say of their weights: the label of their version, the checksums of their tensors.
#
# Invariant: nothing is taken from what a caller asked for; a worker that does not tell has no label.

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
) -> list[WorkerResult]:
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


# Whether somebody still listens where a worker was: noticed sooner than its probes would.
#
# Invariant: one that is slow is never taken for one that is gone; a refusal has to come twice. Each
# look is a whole request: servers keep a connection that asked for nothing for a long time.

LOOK_SECS: Final = 0.5
ANSWER_SECS: Final = 2.0
TWICE: Final = 2
REFUSED: Final = "ConnectError"


async def until_refused(worker: Worker, endpoint: str) -> str:
    """Why it is taken for gone. `endpoint`: a path that is cheap to ask for."""
    refused = 0
    while refused < TWICE:
        await trio.sleep(LOOK_SECS)
        outcome = await call_worker(worker, Call("GET", endpoint, timeout_secs=ANSWER_SECS))
        refused = refused + 1 if outcome.error == REFUSED else 0
    return "nobody listens at its address any more"
