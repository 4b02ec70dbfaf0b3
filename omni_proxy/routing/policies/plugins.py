"""Policies of other packages: loads and checks them, and isolates the proxy from their failures.

`[routing] policy` names an entry point of the group `omni_proxy.policies`, or
"package.module:Class". The configuration is refused if the class can't be loaded or created.
Invariant: if a policy raises or returns a worker that is no candidate, no request fails: `FALLBACK`
picks instead. The failure is counted in GET /status and logged at most once per
`LOG_INTERVAL_SECS`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final

from omni_proxy.config.fields import ENTRY_POINT_GROUP, POLICIES
from omni_proxy.config.parse import ConfigError, Problem
from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.least_request import LeastRequest
from omni_proxy.routing.policies.policy import Policy, RandomBelow

FALLBACK: Final = "least_request"
LOG_INTERVAL_SECS: Final = 60.0

_log = logging.getLogger(__name__)


class PolicyLoadError(Exception):
    """A policy can't be loaded: `reason` for the user, and `hint` with a remedy."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def load_policy_class(name: str) -> type[Policy]:
    """The class for a policy name in the configuration. Raises PolicyLoadError."""
    loaded: object
    path = name
    if ":" not in name:
        points = [*entry_points(group=ENTRY_POINT_GROUP, name=name)]
        if not points:
            raise PolicyLoadError(
                f'no installed package has a policy "{name}"',
                f"install it for this Python, with an entry point in {ENTRY_POINT_GROUP}",
            )
        path = points[0].value
    module, _, attribute = path.partition(":")
    try:
        loaded = import_module(module.strip())
    except (Exception, SystemExit) as error:
        raise PolicyLoadError(
            f"the module {module} of the policy {name} can't be imported: {_error_text(error)}",
            "put its folder on PYTHONPATH, or install its package for this Python",
        ) from None
    for step in attribute.strip().split("."):
        loaded = getattr(loaded, step, None)
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        raise PolicyLoadError(
            f"{path} of the policy {name} is not a class derived from Policy",
            f"derive it from {Policy.__module__}.Policy",
        )
    missing: frozenset[str] = loaded.__abstractmethods__
    if missing:
        raise PolicyLoadError(
            f"the policy {name} lacks {' and '.join(sorted(missing))}", "define them in its class"
        )
    return loaded


def check_policy(config: Config, file: str) -> None:
    """Load and create the named policies that are not built in; blocks while modules are imported.

    Raises ConfigError.
    """
    routing = config.routing
    names = {
        "routing.policy": routing.policy,
        "routing.disaggregation.prefill_policy": routing.disaggregation.prefill_policy,
        "routing.disaggregation.decode_policy": routing.disaggregation.decode_policy,
    }
    problems = []
    for key, name in names.items():
        if name in ("", *POLICIES):
            continue
        try:
            _create(load_policy_class(name), name, routing)
        except PolicyLoadError as error:
            problems.append(Problem(key, None, error.reason, error.hint, file))
    if problems:
        raise ConfigError(problems, file)


def _create(policy_class: type[Policy], name: str, routing: RoutingConfig) -> None:
    try:
        policy_class.create(routing, lambda bound: 0, 0.0)
    except Exception as error:
        raise PolicyLoadError(
            f"the policy {name} can't be created: {_error_text(error)}",
            "fix its create or __init__, which must take no further arguments",
        ) from None


def create_plugin(routing: RoutingConfig, random_below: RandomBelow, now: float) -> GuardedPolicy:
    """The policy that `routing` names, guarded. Never raises, because an accepted configuration
    has to be applied: if the policy can no longer be created, FALLBACK is used."""
    name = routing.policy
    try:
        inner = load_policy_class(name).create(routing, random_below, now)
    except Exception as error:
        _log.error(
            "policy_unavailable policy=%s error=%s fallback=%s",
            name, _error_text(error), FALLBACK,
        )  # fmt: skip
        return GuardedPolicy(name, None, now)
    return GuardedPolicy(name, inner, now)


class GuardedPolicy(Policy):
    """Wraps a policy of another package and catches whatever it raises. For requests only `pick` is
    called, because the other methods may be slow or fail."""

    explains_itself = False

    __slots__ = (
        "_fallback", "_log_after", "_now", "failures", "inner", "name", "needs_affinity_key",
    )  # fmt: skip

    def __init__(self, name: str, inner: Policy | None, now: float) -> None:
        """`inner` None: the policy could not be created, and the fallback is used."""
        self.name = name
        self.inner = inner
        self.needs_affinity_key = inner is not None and bool(inner.needs_affinity_key)
        self.failures = 0
        self._fallback = LeastRequest()
        self._now = now
        self._log_after = now

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        if self.inner is not None:
            try:
                worker = self.inner.pick(candidates, requirements)
                if worker in candidates:
                    return worker
                self._report("pick", ValueError(f"{worker!r} is not a candidate"))
            except Exception as error:
                self._report("pick", error)
        return self._fallback.pick(candidates, requirements)

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        if self.inner is not None:
            try:
                worker, reason = self.inner.preview_pick(candidates, requirements)
                if worker in candidates:
                    return worker, str(reason)
                self._report("preview_pick", ValueError(f"{worker!r} is not a candidate"))
            except Exception as error:
                self._report("preview_pick", error)
        worker, reason = self._fallback.preview_pick(candidates, requirements)
        return worker, f"the policy {self.name} failed, so {FALLBACK}: {reason}"

    def explain_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> dict[str, object]:
        try:
            return (
                self.inner.explain_pick(candidates, requirements) if self.inner is not None else {}
            )
        except Exception as error:
            self._report("explain_pick", error)
            return {}

    def record_pick(self, worker: Worker, requirements: Requirements) -> None:
        try:
            if self.inner is not None:
                self.inner.record_pick(worker, requirements)
        except Exception as error:
            self._report("record_pick", error)

    def forget_worker(self, worker: Worker) -> None:
        try:
            if self.inner is not None:
                self.inner.forget_worker(worker)
        except Exception as error:
            self._report("forget_worker", error)

    def maintain(self, now: float) -> None:
        self._now = now
        try:
            if self.inner is not None:
                self.inner.maintain(now)
        except Exception as error:
            self._report("maintain", error)

    def reconfigure(self, routing: RoutingConfig) -> bool:
        try:
            return self.inner is not None and bool(self.inner.reconfigure(routing))
        except Exception as error:
            self._report("reconfigure", error)
            return False

    def stats(self) -> dict[str, object]:
        stats: dict[str, object] = {}
        try:
            if self.inner is not None:
                stats = dict(self.inner.stats())
        except Exception as error:
            self._report("stats", error)
        return {**stats, "policy_failures": self.failures, "fallback": FALLBACK}

    def _report(self, method: str, error: Exception) -> None:
        self.failures += 1
        if self._now < self._log_after:
            return
        self._log_after = self._now + LOG_INTERVAL_SECS
        _log.error(
            "policy_failed policy=%s method=%s error=%s failures=%d fallback=%s",
            self.name, method, _error_text(error), self.failures, FALLBACK,
        )  # fmt: skip


def _error_text(error: BaseException) -> str:
    """The error's type and message, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    return f"{type(error).__name__}: {error}{where}"
