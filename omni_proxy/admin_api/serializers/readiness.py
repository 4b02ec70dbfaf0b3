"""Whether new requests can be served now, and if not why: what /ready, the feed and /metrics say.

Invariant: one answer for all of them. A worker whose engine is paused does not count, also where it
is routable ([routing] while_paused = "pass"): its requests would hang.
"""

from __future__ import annotations

import time
from typing import Final

from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.protocol.journal import PauseRecord

LEAVING: Final = "leaving"
OPENING: Final = "first_probes"
ALL_PAUSED: Final = "paused"
NOBODY: Final = "no_routable_worker"
GO_ON: Final = "`omni-proxy weights continue` (POST /continue_generation) ends it"


def unready(rooms: Services) -> str:
    """Why not, in one word, "" while it is; a leaving program has workers as good as before."""
    if rooms.door.draining or rooms.leaving():
        return LEAVING
    if is_opening(rooms):
        return OPENING
    pauses = rooms.desk.journal.pauses()
    workers = rooms.fleet.workers
    if any(worker.routable and worker.url not in pauses for worker in workers):
        return ""
    return ALL_PAUSED if any(_but_for_a_pause(worker, pauses) for worker in workers) else NOBODY


def _but_for_a_pause(worker: Worker, pauses: dict[str, PauseRecord]) -> bool:
    """Whether it would take requests if its engine went on."""
    healthy = worker.health.state is Health.HEALTHY
    return (
        worker.url in pauses
        and healthy
        and not worker.disabled
        and worker.cordon_reasons <= {"paused"}
    )


def _is_unjudged(worker: Worker) -> bool:
    """No probe of it has ended, or only good ones, and too few of them."""
    machine = worker.health
    return machine.state is Health.UNKNOWN and not machine.consecutive_failures


def is_opening(rooms: Services) -> bool:
    """Whether a worker of the command line is yet to be judged by its first probes.

    Under sglang-router's dialect only, whose users take a 200 for "all given workers are in",
    and for no longer than a probe may take.
    """
    if rooms.dialect != "sglang":
        return False
    if time.monotonic() - rooms.started > rooms.config_store.config.health.timeout_secs:
        return False
    found = (rooms.fleet.find(url) for url in rooms.given)
    return any(worker is not None and _is_unjudged(worker) for worker in found)


def in_words(rooms: Services, reason: str) -> str:
    """A sentence that names nobody, for those who have no key, too."""
    if reason == LEAVING:
        return "the proxy is shutting down"
    if reason == OPENING:
        return "the first probes of the given workers have not ended"
    if reason == NOBODY:
        return "no worker takes requests" if rooms.fleet.workers else "there is no worker"
    since = min(pause.at for pause in rooms.desk.journal.pauses().values())
    when = f" since {since}" if since else ""
    return f"every worker that could take requests is paused{when}: {GO_ON}"
