"""The registry of workers, and the candidates of a request.

Invariant: a worker that stays keeps its object (health, counts, connections) through every change.
`revision` rises with every change that can alter a result of `candidates`; the lists it returns are
shared, and callers must not change them. Every change of a worker goes through `Fleet`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote

from omni_proxy.config.fields import Role
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.cordon_reasons import LEAVING_CORDON
from omni_proxy.fleet.dp_rank import DpRank, with_ranks
from omni_proxy.fleet.engine_load import EngineLoads
from omni_proxy.fleet.health_state import Health, Thresholds
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import ReportedRole, Worker

CANDIDATE_LISTS = 1024  # bounds memory: clients choose the model names in the keys


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """The workers that one `apply` added, removed and changed, in registration order."""

    added: tuple[Worker, ...]
    removed: tuple[Worker, ...]
    changed: tuple[Worker, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


async def _no_replicas() -> None:
    """With one process there is no replication to wait for."""


class Fleet:
    """All workers. Every method is one atomic change; watchers run after it, once per change."""

    def __init__(self) -> None:
        self.revision = 0
        # Returns when every process that routes requests has this state.
        self.await_replicated: Callable[[], Awaitable[None]] = _no_replicas
        # Returns when no other proxy of the cluster sends requests to workers that are cordoned for
        # their weights. Raises HttpError 503 if that can't be ensured; then no call may be sent.
        self.await_cluster: Callable[[], Awaitable[None]] = _no_replicas
        self.thresholds = Thresholds()
        self.loads = EngineLoads()  # load reports affect picks, not the candidate lists
        self.has_inflight_limits = (
            False  # some worker has a max_inflight: a pick looks at free slots
        )
        self.has_ranks = False  # some worker has data-parallel ranks, which are picked in its place
        self.has_named_models = False  # some worker has a model: a request's model may matter
        self.has_adapters = False  # some worker has adapters, which requests name as their model
        self.has_pools = False  # some worker is a prefill or decode worker
        self.had_workers = False  # a worker was registered at some time since the start
        self._by_url: dict[str, Worker] = {}
        # Models and adapters of all workers; replaced, never changed in place.
        self.models: set[str] = set()
        self._adapters: frozenset[str] = frozenset()
        self._has_base_models = False
        # The lists of `candidates`, by known model (or None, or "" for all others) and mask; each
        # change clears it.
        self.candidate_cache: dict[tuple[str | None, int], list[Worker]] = {}
        self._pools: dict[tuple[Role, str | None, int], list[Worker]] = {}
        self._known_ranks: dict[Worker, list[DpRank]] = {}
        self._watchers: list[Callable[[], None]] = []
        self._member_watchers: list[Callable[[], None]] = []
        self._worker_watchers: list[Callable[[Worker], None]] = []
        self._health_watchers: list[Callable[[Worker, Health], None]] = []
        self._ejection_watchers: list[Callable[[Worker], None]] = []
        self._cache_watchers: list[Callable[[Worker], None]] = []
        self._replaced_watchers: list[Callable[[Worker], None]] = []

    async def await_held(self) -> None:
        """Wait for both `await_replicated` and `await_cluster`. Raises HttpError 503."""
        await self.await_replicated()
        await self.await_cluster()

    @property
    def workers(self) -> list[Worker]:
        return list(self._by_url.values())

    @property
    def live_workers(self) -> list[Worker]:
        """The workers that fleet-wide operations include: not dead, and not leaving the fleet."""
        return [
            worker
            for worker in self._by_url.values()
            if worker.health.state is not Health.DEAD
            and LEAVING_CORDON not in worker.cordon_reasons
        ]

    def watch(self, callback: Callable[[], None]) -> None:
        """`callback` runs synchronously after each change of membership, settings or state.

        Thousands of workers may start within seconds: register a callback that visits all workers
        with `watch_members`, and one that visits a single worker with `watch_worker`. Each change
        calls the callbacks of exactly one of the two.
        """
        self._watchers.append(callback)

    def watch_members(self, callback: Callable[[], None], *, first: bool = False) -> None:
        """`callback()` after a change of membership, of settings, or of many workers. `first`:
        before the callbacks that send waiting requests to workers."""
        self._member_watchers.insert(0 if first else len(self._member_watchers), callback)

    def watch_worker(self, callback: Callable[[Worker], None], *, first: bool = False) -> None:
        """`callback(worker)` after a change of one worker, which may have been removed since.
        `first`: as in `watch_members`."""
        self._worker_watchers.insert(0 if first else len(self._worker_watchers), callback)

    def names(self, model: str) -> bool:
        """Whether some worker has this model."""
        return model in self.models

    def find(self, url: str) -> Worker | None:
        return self._by_url.get(url)

    def has_healthy(self, worker: Worker) -> bool:
        """Whether the worker is healthy and still in the fleet."""
        return self._by_url.get(worker.url) is worker and worker.health.state is Health.HEALTHY

    def get(self, id_or_url: str) -> Worker | None:
        """Look up a worker by URL or worker id, percent-encoded or not (note:omni-router 2)."""
        return self._by_url.get(id_or_url) or self._by_url.get(unquote(id_or_url))

    def apply(self, entries: Sequence[WorkerSpec], now: datetime) -> MembershipChange:
        """Make the fleet equal to `entries`, in their order."""
        before = self._by_url
        after: dict[str, Worker] = {}
        added: list[Worker] = []
        changed: list[Worker] = []
        for entry in entries:
            worker = before.get(entry.url)
            if worker is None or worker.is_other_than(entry):
                worker = self._make(entry, now)
                added.append(worker)
            elif not worker.matches(entry):
                if worker.disabled != entry.disabled:
                    worker.disabled_changed_at = now
                worker.configure(entry)
                changed.append(worker)
            after[entry.url] = worker
        removed = tuple(member for url, member in before.items() if after.get(url) is not member)
        reordered = list(before) != list(after)
        self._by_url = after
        self.had_workers |= bool(after)
        self.has_inflight_limits = any(worker.max_inflight for worker in after.values())
        replaced = self._follow_ranks(after.values())
        self._note_models()
        self._note_roles()
        change = MembershipChange(tuple(added), removed, tuple(changed))
        if change or reordered:
            self._changed()
        for worker in removed:
            self._known_ranks.pop(worker, None)
            self.cache_cleared(worker)
        self._replaced(replaced)
        return change

    def set_peer_in_flight(self, target: Worker, count: int) -> None:
        """Set how many requests of other proxies are in flight at a worker or rank."""
        target.in_flight += count - target.peer_in_flight
        target.peer_in_flight = count

    def is_over_limit(self, worker: Worker) -> bool:
        """Whether another process took the last slot of a worker that was just acquired.

        Never with one process.
        """
        return False

    @property
    def candidate_lists(self) -> int:
        """How many lists `candidates` and `pool` keep; at most `CANDIDATE_LISTS` each."""
        return len(self.candidate_cache) + len(self._pools)

    def candidates(self, model: str | None, mask: int) -> list[Worker]:
        """Routable regular workers with every capability of `mask`, narrowed to the model.

        Workers with another model drop out; if no candidate has a model, the request's model is
        ignored (note:omni-router 8). The list is cached until the fleet changes.
        """
        if model is not None and model not in self.models:
            # One key for all unknown names, because clients may send any number of them.
            model = "" if self._has_base_models else None
        key = (model, mask)
        candidates = self.candidate_cache.get(key)
        if candidates is None:
            candidates = self._select("regular", model, mask)
            if len(self.candidate_cache) >= CANDIDATE_LISTS:
                self.candidate_cache.clear()
            self.candidate_cache[key] = candidates
        return candidates

    def pool(self, role: Role, model: str | None, mask: int) -> list[Worker]:
        """As `candidates`, but of the workers with this role. Also cached until the fleet
        changes."""
        if role == "regular":
            return self.candidates(model, mask)
        if model is not None and model not in self.models:
            model = "" if self._has_base_models else None
        key = (role, model, mask)
        workers = self._pools.get(key)
        if workers is None:
            workers = self._select(role, model, mask)
            if len(self._pools) >= CANDIDATE_LISTS:
                self._pools.clear()
            self._pools[key] = workers
        return workers

    def _select(self, role: Role, model: str | None, mask: int) -> list[Worker]:
        workers = [
            w
            for w in self._by_url.values()
            if w.role == role and w.routable and w.mask & mask == mask
        ]
        if model is not None and (model in self._adapters or any(w.model for w in workers)):
            workers = [w for w in workers if w.serves(model)]
        return with_ranks(workers) if self.has_ranks else workers

    def observe_probe(
        self, worker: Worker, *, status: int | None, error: str | None, at: datetime, epoch: int
    ) -> None:
        """Record a probe result. `error`: None for a good probe. Ignored if `epoch` is stale."""
        if epoch != worker.health.epoch:
            return
        before = worker.health.state
        if error is None:
            worker.health.record_probe_success(self.thresholds, at, status)
        else:
            worker.health.record_probe_failure(self.thresholds, at, status, error)
        self._notify_health(worker, before)

    def observe_request_failure(
        self, worker: Worker, *, status: int | None, error: str, at: datetime, half_open_id: int = 0
    ) -> None:
        """`half_open_id`: the number of the half-open request, 0 for any other."""
        before = worker.health.state
        ejected = worker.health.record_request_failure(
            self.thresholds, at, status, error, half_open_id
        )
        self._notify_health(worker, before)
        if ejected:
            for callback in self._ejection_watchers:
                callback(worker)

    def observe_success(self, worker: Worker, half_open_id: int = 0) -> None:
        """Needed only while `health.failed_requests` is not 0. `half_open_id`: the number of the
        half-open request, 0 for any other."""
        if worker.health.record_request_success(half_open_id):
            self._changed(worker)

    def begin_half_open(self, worker: Worker) -> int:
        """Begin the half-open request; no other is routed until it ends. Returns its number."""
        half_open_id = worker.health.begin_half_open()
        self._changed(worker)
        return half_open_id

    def end_half_open(self, worker: Worker, half_open_id: int) -> None:
        """The half-open request ended. If its result did not count, the next one is half-open."""
        if worker.health.end_half_open(half_open_id):
            self._changed(worker)

    def process_exited(self, worker: Worker, error: str, at: datetime) -> None:
        """The launcher reports that the worker's process exited."""
        before = worker.health.state
        worker.health.process_exited(at, error)
        self._notify_health(worker, before)
        self.set_version(worker, None, 0)
        self.cache_cleared(worker)

    def mark_dead(self, worker: Worker, at: datetime, *, declared: bool = False) -> None:
        """`declared`: by an operator, so the worker stays dead after a restart of its process."""
        before = worker.health.state
        worker.health.mark_dead(at, declared=declared)
        self._notify_health(worker, before)

    def revive(self, worker: Worker, at: datetime) -> None:
        before, tripped = worker.health.state, worker.health.breaker_tripped
        worker.health.revive(at)
        self._notify_health(worker, before)
        if tripped and before is worker.health.state:
            self._changed(worker)

    def cordon(self, worker: Worker, reason: str) -> None:
        """Take a worker out of rotation for a reason of the proxy, independent of `disabled`."""
        worker.cordon_reasons.add(reason)
        self._changed(worker)

    def uncordon(self, worker: Worker, reason: str) -> None:
        worker.cordon_reasons.discard(reason)
        self._changed(worker)

    def set_version(self, worker: Worker, label: str | None, epoch: int) -> None:
        """Set the version of its weights; None and 0 while unknown."""
        version = WeightVersion(label, epoch)
        if version != worker.weight_version:
            worker.weight_version = version
            self._changed(worker)

    def report_role(self, worker: Worker, role: ReportedRole) -> None:
        """Apply the role that its engine reports; a configured role takes precedence."""
        if worker.report_role(role):
            self._note_roles()
            self._changed(worker)

    def report_bootstrap_port(self, worker: Worker, port: int | None) -> None:
        """Apply the port that its engine reports; a port configured for a prefill worker takes
        precedence."""
        if worker.report_bootstrap_port(port):
            self._changed(worker)

    def report_adapters(self, worker: Worker, names: tuple[str, ...]) -> None:
        """Apply the adapters that its engine reports, named as by `adapter_names`; used with
        `loras = "auto"`."""
        if worker.report_adapters(names):
            self._note_models()
            self._changed()

    def report_ranks(self, worker: Worker, ranks: int) -> None:
        """Apply the number of data-parallel ranks that its engine reports; used with
        `ranks = "auto"`."""
        before, worker.reported_ranks = worker.rank_count, ranks
        if worker.rank_count != before:
            replaced = self._follow_ranks(self._by_url.values())
            self._changed(worker)
            self._replaced(replaced)

    def restored(self, worker: Worker) -> None:
        """The worker's state was restored from the previous program: health watchers don't run."""
        self._note_roles()
        self._note_models()
        self._changed(worker)

    def set_hop_line(self, worker: Worker, hop_line: bytes) -> None:
        """Set the header line that is added to the worker's requests to detect a proxy loop."""
        if hop_line != worker.hop_line:
            worker.hop_line = hop_line
            self._changed(worker)

    def count_by_state(self) -> dict[str, int]:
        """Worker counts by state, under their names in the API."""
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

    def watch_ejected(self, callback: Callable[[Worker], None]) -> None:
        """`callback(worker)` after failed requests ejected it."""
        self._ejection_watchers.append(callback)

    def watch_cache_cleared(self, callback: Callable[[Worker], None]) -> None:
        """`callback(worker)` after its prefix cache was lost; may run twice for one cause."""
        self._cache_watchers.append(callback)

    def cache_cleared(self, worker: Worker) -> None:
        """The worker's prefix cache was lost: it was removed, restarted or flushed."""
        for callback in self._cache_watchers:
            callback(worker)

    def watch_health(self, callback: Callable[[Worker, Health], None]) -> None:
        """`callback(worker, before)` after each change of a worker's state."""
        self._health_watchers.append(callback)

    def _note_models(self) -> None:
        workers = self._by_url.values()
        models = {worker.model for worker in workers if worker.model}
        self._has_base_models = bool(models)
        self._adapters = frozenset().union(*(worker.adapters for worker in workers))
        self.has_adapters = bool(self._adapters)
        models |= self._adapters
        if models != self.models:
            self.models = models
        self.has_named_models = bool(models)

    def _note_roles(self) -> None:
        self.has_pools = any(worker.role != "regular" for worker in self._by_url.values())

    def watch_replaced(self, callback: Callable[[Worker], None]) -> None:
        """`callback(target)` when a change of `ranks` takes a rank out of picks, or a worker whose
        ranks are now picked instead."""
        self._replaced_watchers.append(callback)

    def known_ranks(self, worker: Worker) -> Sequence[DpRank]:
        """All ranks that the worker has or had: requests in flight at former ranks still count."""
        return self._known_ranks.get(worker, ())

    def targets(self) -> list[Worker]:
        """All workers, and all ranks that they have or had."""
        workers = list(self._by_url.values())
        return [*workers, *(rank for worker in workers for rank in self.known_ranks(worker))]

    def _replaced(self, targets: Iterable[Worker]) -> None:
        for target in targets:
            for callback in self._replaced_watchers:
                callback(target)

    def _follow_ranks(self, workers: Iterable[Worker]) -> list[Worker]:
        """Set each worker's current ranks. Returns the ranks and workers no longer picked."""
        replaced: list[Worker] = []
        self.has_ranks = False
        for worker in workers:
            before, count = worker.dp_ranks, worker.rank_count
            if count > 1 or before:
                self._set_ranks(worker, count if count > 1 else 0)
                replaced += before[len(worker.dp_ranks) :] if before else (worker,)
                self.has_ranks |= bool(worker.dp_ranks)
        return replaced

    def _set_ranks(self, worker: Worker, count: int) -> None:
        ranks = self._known_ranks.setdefault(worker, [])
        while len(ranks) < count:
            ranks.append(self._make_rank(worker, len(ranks)))
        for rank in ranks[:count]:
            rank.follow_worker(count)
        if len(worker.dp_ranks) != count:
            worker.dp_ranks = tuple(ranks[:count])

    def _make_rank(self, worker: Worker, index: int) -> DpRank:
        return DpRank(worker, index)

    def _make(self, entry: WorkerSpec, now: datetime) -> Worker:
        return Worker(entry, now)

    def _notify_health(self, worker: Worker, before: Health) -> None:
        if worker.health.state is not before:
            self._changed(worker)
            for callback in self._health_watchers:
                callback(worker, before)

    def _changed(self, worker: Worker | None = None) -> None:
        """Notify the watchers; `worker` if only that one changed."""
        self.revision += 1
        self.candidate_cache.clear()
        self._pools.clear()
        if worker is None:
            for callback in self._member_watchers:
                callback()
        else:
            for on_worker in self._worker_watchers:
                on_worker(worker)
        for callback in self._watchers:
            callback()
