"""Sticky sessions on top of any policy: an affinity key stays with its worker while that worker is
a candidate.

Invariant: a session moves only if its worker can't take the request, or is overloaded enough for
rebalancing (`sticky_rebalance_abs`). While a weight operation keeps its worker out of rotation, and
requests may wait for that, the session is held: `pick` raises and picks no other worker. A flushed
or restarted worker keeps its sessions; they move if the worker leaves the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_proxy.cluster.session_places import SessionNotes
from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.cordon_reasons import PAUSED, UPDATING
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.policies.least_request import load_of, load_word
from omni_proxy.routing.policies.policy import Policy
from omni_proxy.routing.policies.session_load import (
    OwnSessions,
    SessionRow,
    Sessions,
    fewest_sessions,
)
from omni_proxy.routing.prefix_tree import PrefixTree
from omni_proxy.wire.errors import HttpError

HOLDING_CORDONS = frozenset((PAUSED, UPDATING))  # after these a worker returns to rotation


class Sticky(Policy):
    """Has the name of the inner policy."""

    __slots__ = (
        "_begun", "_by_sessions", "_finished", "_held_reasons", "_is_member", "_kept", "_moved",
        "_now", "_rebalance_abs", "_rebalance_rel", "_rebalanced", "_sessions", "_turn", "inner",
        "name",
    )  # fmt: skip
    needs_affinity_key = True

    def __init__(self, inner: Policy, routing: RoutingConfig, now: float) -> None:
        self.inner = inner
        self.name = inner.name
        self._now = now
        self._sessions: Sessions = OwnSessions()
        self._held_reasons: frozenset[str] = frozenset()
        self._is_member: Callable[[Worker], bool] = _every_worker
        self._kept = self._begun = self._moved = self._rebalanced = self._finished = 0
        self._turn = 0
        self._set_rules(routing)

    def _set_rules(self, routing: RoutingConfig) -> None:
        self._by_sessions = routing.sticky_load == "sessions"
        self._rebalance_abs = routing.sticky_rebalance_abs
        self._rebalance_rel = routing.sticky_rebalance_rel
        self._sessions.tune(routing.sticky_max, routing.sticky_idle_secs)

    def use_sessions(self, sessions: Sessions, routing: RoutingConfig) -> None:
        """Replace the table of sessions; sessions in the old one are dropped."""
        self._sessions = sessions
        self._set_rules(routing)

    def hold_for(self, reasons: frozenset[str], is_member: Callable[[Worker], bool]) -> None:
        """Set the cordons of a worker, out of `HOLDING_CORDONS`, for which its sessions wait.

        `is_member`: returns whether a worker is still in the fleet.
        """
        self._held_reasons, self._is_member = reasons, is_member

    def reconfigure(self, routing: RoutingConfig) -> bool:
        self._set_rules(routing)
        return self.inner.reconfigure(routing)

    def replace_inner(self, inner: Policy) -> None:
        """Replace the inner policy; the sessions are kept."""
        self.inner = inner
        self.name = inner.name

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        """Raises HttpError 503 for a session whose worker is being updated or paused."""
        key = requirements.affinity_key
        if not key:
            return self.inner.pick(candidates, requirements)
        home = self._sessions.find(key, self._now)
        if home is not None and home in candidates:
            worker = home
            if (
                self._rebalance_abs
                and (less_loaded := self._less_loaded(home, candidates)) is not None
            ):
                worker = less_loaded
                self._rebalanced += 1
            else:
                self._kept += 1
            self.inner.record_pick(worker, requirements)
        else:
            if home is None:
                self._begun += 1
            elif self._waits_for(home, requirements):
                raise _held_error(home)
            else:
                self._moved += 1
            worker = self._place(candidates, requirements)
        self._sessions.keep(key, worker, self._now)
        return worker

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        """Raises HttpError 503 like `pick`."""
        key = requirements.affinity_key
        home = self._sessions.find(key, self._now) if key else None
        if home is not None and home in candidates:
            less_loaded = self._less_loaded(home, candidates) if self._rebalance_abs else None
            if less_loaded is None:
                return home, "its session stays there"
            return less_loaded, (
                f"its session moves: {home.in_flight} in flight at {home.url}, here "
                f"{less_loaded.in_flight}"
            )
        if home is not None and self._waits_for(home, requirements):
            raise _held_error(home)
        if key and self._by_sessions:
            worker = self._fewest_sessions(candidates)
            reason = (
                f"the fewest sessions of {len(candidates)}: {self._sessions.count(worker)}, "
                f"{load_word(worker)}"
            )
        else:
            worker, reason = self.inner.preview_pick(candidates, requirements)
        return worker, f"{'a new session' if key else 'without a session key'}: {reason}"

    def explain_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> dict[str, object]:
        return self.inner.explain_pick(candidates, requirements)

    def cached_prefix(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[bytes, dict[Worker, int]] | None:
        return self.inner.cached_prefix(candidates, requirements)

    def record_pick(self, worker: Worker, requirements: Requirements) -> None:
        self.inner.record_pick(worker, requirements)

    def forget_worker(self, worker: Worker) -> None:
        self.inner.forget_worker(worker)

    def use_blocks(self, blocks: BlockIndex) -> None:
        self.inner.use_blocks(blocks)

    def use_hints(self, hints: ClusterHints) -> None:
        self.inner.use_hints(hints)

    def share_sessions(self, notes: SessionNotes, prefix: str) -> None:
        """See `Sessions.share`."""
        self._sessions.share(notes, prefix)

    def place_session(self, digest: bytes, worker: Worker | None) -> None:
        """See `Sessions.place`."""
        self._sessions.place(digest, worker, self._now)

    def maintain(self, now: float) -> None:
        self._now = now
        self.inner.maintain(now)
        self._sessions.maintain(now)

    def stats(self) -> dict[str, object]:
        sessions = {
            "sessions": len(self._sessions),
            "kept": self._kept,
            "begun": self._begun,
            "moved": self._moved,
            "rebalanced": self._rebalanced,
            "finished": self._finished,
        }
        return {**self.inner.stats(), "sticky": sessions}

    def finish_session(self, key: str) -> bool:
        """End the session, so that it no longer counts as load; returns whether it existed."""
        existed = self._sessions.finish(key)
        self._finished += existed
        return existed

    @property
    def explains_itself(self) -> bool:  # type: ignore[override]  # read-only
        return self.inner.explains_itself

    @property
    def prefix_tree(self) -> PrefixTree[Worker] | None:
        return self.inner.prefix_tree

    def adopt_tree(self, tree: PrefixTree[Worker]) -> None:
        self.inner.adopt_tree(tree)

    def session_rows(self, limit: int) -> list[SessionRow]:
        """Sessions for a new program in an upgrade; [] if they are shared with other processes."""
        return self._sessions.rows(limit) if isinstance(self._sessions, OwnSessions) else []

    def restore_sessions(
        self, rows: Sequence[SessionRow], find: Callable[[str], Worker | None]
    ) -> None:
        """Restore the sessions of the old program in an upgrade; `find`: a worker by URL."""
        for key, url, used in rows:
            worker = find(url)
            if worker is not None:
                self._sessions.keep(key, worker, used)

    def session_count(self, worker: Worker) -> int:
        return self._sessions.count(worker)

    def held_worker(self, requirements: Requirements) -> Worker | None:
        """The worker that the request's session waits for; None if it does not wait."""
        if not requirements.affinity_key or not self._held_reasons:
            return None
        home = self._sessions.find(requirements.affinity_key, self._now)
        return home if home is not None and self._waits_for(home, requirements) else None

    def _place(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        """The worker for a new session, or for one whose worker is not available."""
        if not self._by_sessions:
            return self.inner.pick(candidates, requirements)
        worker = self._fewest_sessions(candidates)
        self._turn += 1
        self.inner.record_pick(worker, requirements)
        return worker

    def _fewest_sessions(self, candidates: Sequence[Worker]) -> Worker:
        """Workers that exceed the rebalancing bounds are left out: a new session there would move
        with its next request."""
        if self._rebalance_abs:
            lowest_load = min(load_of(worker) / worker.weight for worker in candidates)
            candidates = [
                worker
                for worker in candidates
                if not self._is_open(load_of(worker) / worker.weight, lowest_load)
            ]
        return fewest_sessions(candidates, self._sessions, self._turn)

    def _waits_for(self, home: Worker, requirements: Requirements) -> bool:
        """Whether a weight operation is the only reason why `home` can't take the request."""
        reasons = home.cordon_reasons
        return (
            bool(reasons)
            and reasons <= self._held_reasons
            and home.health.state is Health.HEALTHY
            and not home.disabled
            and home.mask & requirements.mask == requirements.mask
            and (not requirements.model or home.model is None or home.serves(requirements.model))
            and self._is_member(home)
        )

    def _less_loaded(self, home: Worker, candidates: Sequence[Worker]) -> Worker | None:
        """The least loaded candidate if `home` exceeds its load by both `sticky_rebalance_abs` and
        `sticky_rebalance_rel`, per unit of weight; else None."""
        home_load = load_of(home) / home.weight
        if home_load < self._rebalance_abs:
            return None
        count = self._sessions.count
        idlest = min(
            candidates,
            key=lambda candidate: (
                load_of(candidate) / candidate.weight,
                count(candidate) / candidate.weight,
            ),
        )
        return idlest if self._is_open(home_load, load_of(idlest) / idlest.weight) else None

    def _is_open(self, home_load: float, lowest_load: float) -> bool:
        return (
            home_load - lowest_load >= self._rebalance_abs
            and home_load >= self._rebalance_rel * lowest_load
        )


def _every_worker(worker: Worker) -> bool:
    return True


def _held_error(home: Worker) -> HttpError:
    """The response to a client whose request may not wait, or has waited too long."""
    code, word = ("weights_updating", "being updated")
    if UPDATING not in home.cordon_reasons:
        code, word = "paused", "paused by a trainer"
    message = f"no eligible upstream: the worker of this session is {word}: {home.url}"
    return HttpError(503, message, code).with_headers(("retry-after", "1"))
