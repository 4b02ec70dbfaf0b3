"""The registry of workers, and the candidates a request may choose from.

Invariant: a worker that stays keeps its object (health, counts, connections) through every change.
`revision` rises with every change that can alter an answer of `candidates`; the lists it hands out
are shared and must not be changed by the caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.health import Health, Thresholds
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker

CANDIDATE_LISTS = 1024  # models are named by clients: bound what they can make us remember


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """What one `apply` did, as worker objects in registration order."""

    added: tuple[Worker, ...]
    removed: tuple[Worker, ...]
    changed: tuple[Worker, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


async def _nobody_else() -> None:
    """There is one process."""


class Fleet:
    """All known workers. Every method is an atom; watchers are told after it, once per change."""

    def __init__(self) -> None:
        self.revision = 0
        # Wait for it where what is so here has to be so wherever requests are routed.
        self.await_replicated: Callable[[], Awaitable[None]] = _nobody_else
        self.thresholds = Thresholds()
        self.has_inflight_limits = (
            False  # some worker has a max_inflight, so a pick has to look at room
        )
        self.has_named_models = False  # some worker names a model, so a request's model may matter
        self.had_workers = False  # one was registered at some time since the start
        self._by_url: dict[str, Worker] = {}
        self.models: set[str] = set()  # which workers name; another set where they change
        self._candidates: dict[tuple[str | None, int], list[Worker]] = {}
        self._watchers: list[Callable[[], None]] = []
        self._member_watchers: list[Callable[[], None]] = []
        self._worker_watchers: list[Callable[[Worker], None]] = []
        self._health_watchers: list[Callable[[Worker, Health], None]] = []
        self._ejection_watchers: list[Callable[[Worker], None]] = []
        self._forgetful_watchers: list[Callable[[Worker], None]] = []

    @property
    def workers(self) -> list[Worker]:
        return list(self._by_url.values())

    def watch(self, callback: Callable[[], None]) -> None:
        """`callback` runs synchronously after each change of membership, health or switch.

        Thousands of workers come up within seconds: what looks at all of them each time is for
        `watch_members`, what looks at one for `watch_worker`. Each change is told by one of them.
        """
        self._watchers.append(callback)

    def watch_members(self, callback: Callable[[], None]) -> None:
        """`callback` after a change of who is there, of what is configured of them, or of many."""
        self._member_watchers.append(callback)

    def watch_worker(self, callback: Callable[[Worker], None]) -> None:
        """`callback(worker)` after a change of that one alone; it may have been removed."""
        self._worker_watchers.append(callback)

    def names(self, model: str) -> bool:
        """Whether some worker says that this is its model."""
        return model in self.models

    def find(self, url: str) -> Worker | None:
        return self._by_url.get(url)

    def get(self, id_or_url: str) -> Worker | None:
        """By URL or by worker id, encoded or not (omni-router.md 2)."""
        return self._by_url.get(id_or_url) or self._by_url.get(unquote(id_or_url))

    def apply(self, entries: Sequence[WorkerSpec], now: datetime) -> MembershipChange:
        """Make the fleet be `entries`, in their order."""
        before = self._by_url
        after: dict[str, Worker] = {}
        added: list[Worker] = []
        changed: list[Worker] = []
        for entry in entries:
            worker = before.get(entry.url)
            if worker is None:
                worker = self._make(entry, now)
                added.append(worker)
            elif not worker.matches(entry):
                if worker.disabled != entry.disabled:
                    worker.disabled_changed_at = now
                worker.configure(entry)
                changed.append(worker)
            after[entry.url] = worker
        removed = tuple(worker for url, worker in before.items() if url not in after)
        reordered = list(before) != list(after)
        self._by_url = after
        self.had_workers |= bool(after)
        self.has_inflight_limits = any(worker.max_inflight for worker in after.values())
        models = {worker.model for worker in after.values() if worker.model}
        if models != self.models:
            self.models = models
        self.has_named_models = bool(models)
        change = MembershipChange(tuple(added), removed, tuple(changed))
        if change or reordered:
            self._changed()
        for worker in removed:
            self.cache_cleared(worker)
        return change

    def is_over_limit(self, worker: Worker) -> bool:
        """Of one that was just counted up: whether somebody else has been quicker.

        Nobody is, where one process picks."""
        return False

    def candidates(self, model: str | None, mask: int) -> list[Worker]:
        """Routable workers with every capability of `mask`, narrowed to the model.

        Workers that name another model drop out; where no candidate names one, the request's model
        is ignored (omni-router.md 8). The list is kept until the fleet changes.
        """
        if model is not None and model not in self.models:
            # All names that nobody has are one: clients choose them, as many and as long as they
            # like.
            model = "" if self.models else None
        key = (model, mask)
        found = self._candidates.get(key)
        if found is None:
            found = [w for w in self._by_url.values() if w.routable and w.mask & mask == mask]
            if model is not None and any(w.model for w in found):
                found = [w for w in found if w.model == model]
            if len(self._candidates) >= CANDIDATE_LISTS:
                self._candidates.clear()
            self._candidates[key] = found
        return found

    def observe_probe(
        self, worker: Worker, *, status: int | None, error: str | None, at: datetime, epoch: int
    ) -> None:
        """Take a probe's result; `error` is None when it was good, a stale epoch voids it."""
        if epoch != worker.health.epoch:
            return
        with_state = worker.health.state
        if error is None:
            worker.health.record_probe_success(self.thresholds, at, status)
        else:
            worker.health.record_probe_failure(self.thresholds, at, status, error)
        self._after(worker, with_state)

    def observe_request_failure(
        self, worker: Worker, *, status: int | None, error: str, at: datetime, half_open_id: int = 0
    ) -> None:
        """`half_open_id` is the request's number, if it was one."""
        before = worker.health.state
        ejected = worker.health.record_request_failure(
            self.thresholds, at, status, error, half_open_id
        )
        self._after(worker, before)
        if ejected:
            for callback in self._ejection_watchers:
                callback(worker)

    def observe_success(self, worker: Worker, half_open_id: int = 0) -> None:
        """Matters only where `machine.failed_requests` is not 0; `half_open_id` is the request's number."""
        if worker.health.record_request_success(half_open_id):
            self._changed(worker)

    def begin_half_open(self, worker: Worker) -> int:
        """A request goes to a worker that owes a trial: nobody else may until it is over."""
        half_open_id = worker.health.begin_half_open()
        self._changed(worker)
        return half_open_id

    def end_half_open(self, worker: Worker, half_open_id: int) -> None:
        """The request is over; where nothing was learnt the next one is a trial again."""
        if worker.health.end_half_open(half_open_id):
            self._changed(worker)

    def process_exited(self, worker: Worker, error: str, at: datetime) -> None:
        """The launcher saw its process end."""
        before = worker.health.state
        worker.health.process_exited(at, error)
        self._after(worker, before)
        self.set_version(worker, None, 0)
        self.cache_cleared(worker)

    def mark_dead(self, worker: Worker, at: datetime, *, declared: bool = False) -> None:
        """`declared`: by a person; who restarts its process leaves it dead then."""
        before = worker.health.state
        worker.health.mark_dead(at, declared=declared)
        self._after(worker, before)

    def revive(self, worker: Worker, at: datetime) -> None:
        before, on_trial = worker.health.state, worker.health.breaker_tripped
        worker.health.revive(at)
        self._after(worker, before)
        if on_trial and before is worker.health.state:
            self._changed(worker)

    def cordon(self, worker: Worker, reason: str) -> None:
        """Keep a worker out of routing for a reason of ours, beside what an operator said."""
        worker.cordon_reasons.add(reason)
        self._changed(worker)

    def uncordon(self, worker: Worker, reason: str) -> None:
        worker.cordon_reasons.discard(reason)
        self._changed(worker)

    def set_version(self, worker: Worker, label: str | None, epoch: int) -> None:
        """Which weights it has now; None and 0 while that is not known."""
        version = WeightVersion(label, epoch)
        if version != worker.version:
            worker.version = version
            self._changed(worker)

    def set_hop_line(self, worker: Worker, hop_line: bytes) -> None:
        """What its requests carry from now on, so that they are known where they come back."""
        if hop_line != worker.hop_line:
            worker.hop_line = hop_line
            self._changed(worker)

    def count_by_state(self) -> dict[str, int]:
        workers = self._by_url.values()
        states = [worker.health.state for worker in workers]
        return {
            "healthy_workers": states.count(Health.HEALTHY),
            "dead_workers": states.count(Health.DEAD),
            "disabled_workers": sum(worker.disabled for worker in workers),
            "routable_workers": sum(worker.routable for worker in workers),
            "unhealthy_workers": states.count(Health.UNHEALTHY),
            "unknown_workers": states.count(Health.UNKNOWN),
            "total_workers": len(states),
        }

    def summary(self, status: str) -> dict[str, object]:
        """The pool summary of omni-router.md 4."""
        records = [worker.record() for worker in self._by_url.values()]
        return {"status": status, **self.count_by_state(), "workers": records}

    def watch_ejected(self, callback: Callable[[Worker], None]) -> None:
        """`callback(worker)` after request failures alone have put it out."""
        self._ejection_watchers.append(callback)

    def watch_cache_cleared(self, callback: Callable[[Worker], None]) -> None:
        """`callback(worker)` when what it had cached is gone: it may run twice for one cause."""
        self._forgetful_watchers.append(callback)

    def cache_cleared(self, worker: Worker) -> None:
        """It was removed, restarted or flushed."""
        for callback in self._forgetful_watchers:
            callback(worker)

    def watch_health(self, callback: Callable[[Worker, Health], None]) -> None:
        """`callback(worker, before)` after each change of a worker's state."""
        self._health_watchers.append(callback)

    def _make(self, entry: WorkerSpec, now: datetime) -> Worker:
        return Worker(entry, now)

    def _after(self, worker: Worker, before: Health) -> None:
        if worker.health.state is not before:
            self._changed(worker)
            for callback in self._health_watchers:
                callback(worker, before)

    def _changed(self, worker: Worker | None = None) -> None:
        """`worker`: it alone."""
        self.revision += 1
        self._candidates.clear()
        if worker is None:
            for callback in self._member_watchers:
                callback()
        else:
            for look in self._worker_watchers:
                look(worker)
        for callback in self._watchers:
            callback()
