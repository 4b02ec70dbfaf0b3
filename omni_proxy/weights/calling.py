"""The same call to many workers, all of them at once.

Invariant: nobody waits for another's answer to be asked: workers that join a group wait for each
other, so a bound on how many are asked at a time would be a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import trio

from omni_proxy.control.outcomes import WorkerAnswer, parsed
from omni_proxy.fleet.worker import Worker
from omni_proxy.watch.broadcast import ask
from omni_proxy.watch.calls import Call

ANSWER_BYTES = 64 * 1024 * 1024  # a checker names every tensor
Hear = Callable[[WorkerAnswer], None]


async def call_all(
    workers: Sequence[Worker], call: Call, hear: Hear = lambda _: None
) -> list[WorkerAnswer]:
    """In the order of the workers; `hear` gets each answer as it comes."""
    answers: dict[Worker, WorkerAnswer] = {}

    async def one(worker: Worker) -> None:
        outcome = await ask(worker, call)
        answers[worker] = answer = WorkerAnswer(
            worker.url, outcome.status, parsed(outcome.body), outcome.error, outcome.secs
        )
        hear(answer)

    async with trio.open_nursery() as nursery:
        for worker in workers:
            nursery.start_soon(one, worker)
    return [answers[worker] for worker in workers]


def limit_secs(configured: float) -> float:
    """0 is none."""
    return configured or math.inf
