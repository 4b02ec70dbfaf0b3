"""Whether somebody still listens where a worker was: noticed sooner than its probes would.

Invariant: one that is slow is never taken for one that is gone; a refusal has to come twice. Each
look is a whole request: servers keep a connection that asked for nothing for a long time.
"""

from __future__ import annotations

from typing import Final

import trio

from omni_proxy.fleet.worker import Worker
from omni_proxy.watch.broadcast import ask
from omni_proxy.watch.calls import Call

LOOK_SECS: Final = 0.5
ANSWER_SECS: Final = 2.0
TWICE: Final = 2
REFUSED: Final = "ConnectError"


async def until_refused(worker: Worker, endpoint: str) -> str:
    """Why it is taken for gone. `endpoint`: a path that is cheap to ask for."""
    refused = 0
    while refused < TWICE:
        await trio.sleep(LOOK_SECS)
        outcome = await ask(worker, Call("GET", endpoint, timeout_secs=ANSWER_SECS))
        refused = refused + 1 if outcome.error == REFUSED else 0
    return "nobody listens at its address any more"
