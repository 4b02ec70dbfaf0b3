"""The configuration store: the running configuration, from FILE, the state file and the flags.

Invariant: a configuration is applied as a whole or not at all. Steps that may fail (reading,
validating, binding a listener) come before the first change. A subscriber that fails after that
does not stop the others, is reported, and makes the next reload apply the configuration again. All
changes go through one lock and one code path; each effective change increments `revision`. Changes
wait for the `operation_lock` unless they are `at_once`. While the `membership_lock` is held,
changes that FILE makes to the set of workers are deferred until its release.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import trio
from msgspec.structs import replace

from omni_proxy.admin_ops.admin_route_table import check_routes
from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.diff import diff
from omni_proxy.config.overlay import (
    FoundWorker,
    WorkerSpec,
    bind_to_found,
    desired_workers,
    prune_state,
    unnamed_workers,
)
from omni_proxy.config.parse import ConfigError, Problem, parse
from omni_proxy.config.problem import did_you_mean
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState, SavedVoices, with_saved_keys, without_hidden_keys
from omni_proxy.fleet.health_state import thresholds_of
from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.policies.plugins import check_policy
from omni_proxy.runtime_config.key_sources import check_keys
from omni_proxy.runtime_config.membership_lock import MembershipLock
from omni_proxy.runtime_config.state_file import StateFile, load_state, state_path
from omni_proxy.system.files import file_signature
from omni_proxy.system.tls_contexts import check_tls_files
from omni_proxy.upstream_http.resolver import reject_own_addresses

_log = logging.getLogger(__name__)
OTEL_MODULES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
OTEL_INSTALL: Final = "pip install 'omni-proxy[otel]'"

Prepare = Callable[[Config], Callable[[], None]]
Subscriber = Callable[[Config, Config], None]
Edit = Callable[[SavedState, Config], SavedState]


class Predecessor(Protocol):
    """The program before an upgrade, which still serves requests that it received."""

    def close_idle_connections(self) -> None:
        """Close connections that are idle."""

    async def wait_gone(self) -> None:
        """Wait until its last request has ended."""


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """`outcome`: applied, unchanged, refused, or precondition_failed."""

    outcome: str
    revision: int
    diff: dict[str, Any] = field(default_factory=dict)
    error: ConfigError | None = None


def read_file(path: Path | None) -> Config:
    """The current content of FILE; the defaults without one. Raises ConfigError, also for an
    unreadable file."""
    if path is None:
        return Config()
    return parse(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = _similar_file(path) if isinstance(error, FileNotFoundError) else ""
        problem = Problem("", None, f"cannot be read: {error.strerror}", hint, str(path))
        raise ConfigError([problem], str(path)) from None


def _similar_file(path: Path) -> str:
    """A suggestion of a file in the folder with a similar name; "" if there is none."""
    try:
        names = [sibling.name for sibling in path.parent.iterdir() if sibling.suffix == ".toml"]
    except OSError:
        return ""
    return did_you_mean(path.name, names)


def check_extras(config: Config, file: str) -> None:
    """Refuse a file that needs an optional package that is not installed, with the command that
    installs it. Imports only the parents of the package. Blocking. Raises ConfigError."""
    if config.observe.otlp_endpoint and not all(map(_is_installed, OTEL_MODULES)):
        reason = "needs the OpenTelemetry SDK, which is not installed"
        raise ConfigError(
            [Problem("observe.otlp_endpoint", None, reason, OTEL_INSTALL, file)], file
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parents is missing
        return False


class ConfigStore:
    """Reads and validates the configuration when it is constructed; `start` applies it."""

    def __init__(self, startup: Startup, fleet: Fleet) -> None:
        """Raises ConfigError for FILE or the state file."""
        self.startup = startup
        self.fleet = fleet
        self.file = startup.config_path
        self.loaded_signature = file_signature(self.file) if self.file else None
        self.config = startup.effective_config(read_file(self.file))
        check_tls_files(self.config, str(self.file or ""))
        check_keys(self.config, str(self.file or ""))
        check_routes(self.config, str(self.file or ""))
        check_policy(self.config, str(self.file or ""))
        check_extras(self.config, str(self.file or ""))
        reject_own_addresses(self.config, startup.given_urls, str(self.file or ""))
        self.state_file = state_path(startup, self.config)
        self.state = load_state(self.state_file)
        self.config = with_saved_keys(self.config, self.state)
        self._state_writer = StateFile(self.state_file, self.state)
        self.revision = 0
        self.last_reload: dict[str, Any] = {}
        self.reloads: Counter[tuple[str, str]] = Counter()  # outcome, source
        self.operation_lock = trio.Lock()  # acquired before `_lock`, never while it is held
        self.membership_lock = MembershipLock()
        self.predecessor: Predecessor | None = None  # the program before an upgrade
        self._found: tuple[FoundWorker, ...] = ()  # by discovery
        self._unnamed: set[str] = set()  # URLs of workers without a model that were logged
        self._deferred: Config | None = (
            None  # FILE with a change that waits for the membership lock
        )
        # Called with the state before and after a change that was made over HTTP or by this proxy.
        self.on_change: Callable[[SavedState, SavedState], None] = lambda before, after: None
        self._lock = trio.Lock()
        self._prepares: list[Prepare] = []
        self._subscribers: dict[
            Subscriber, Config
        ] = {}  # and the configuration that each has applied last
        self._failures: list[Exception] = []  # of subscribers, for the newest configuration

    @property
    def state_error(self) -> str:
        """The reason why the state could not be saved, else ""."""
        return self._state_writer.error

    def add_prepare(self, prepare: Prepare) -> None:
        """`prepare(new)` runs the steps that may fail (OSError, ConfigError), and returns a
        function that commits them."""
        self._prepares.append(prepare)

    def subscribe(self, callback: Subscriber) -> None:
        """`callback(old, new)` is called after each change. `old` is the configuration that it
        applied last, so after an exception the next reload calls it with the same difference."""
        self._subscribers[callback] = self.config

    def start(self) -> None:
        """Apply the first configuration. Raises OSError if a listener can't be bound, and the
        exceptions of subscribers."""
        self._apply(self.config, self.state, [prepare(self.config) for prepare in self._prepares])
        if self._failures:
            raise self._failures[0]
        self._note("started", "start")

    async def reload(self, source: str, if_match: str | None = None) -> ChangeResult:
        """Read FILE and apply it. The content of the file never makes it raise."""
        async with self._exclusive():
            if not self._matches(if_match):
                return ChangeResult("precondition_failed", self.revision)
            try:
                content = await trio.to_thread.run_sync(read_file, self.file)
                new = with_saved_keys(self.startup.effective_config(content), self.state)
                await trio.to_thread.run_sync(check_tls_files, new, str(self.file or ""))
                await trio.to_thread.run_sync(check_keys, new, str(self.file or ""))
                check_routes(new, str(self.file or ""))
                await trio.to_thread.run_sync(check_policy, new, str(self.file or ""))
                await trio.to_thread.run_sync(check_extras, new, str(self.file or ""))
                urls = self.startup.given_urls
                await trio.to_thread.run_sync(reject_own_addresses, new, urls, str(self.file or ""))
            except ConfigError as error:
                return self._refuse(source, error)
            new = self._without_deferred(new)
            state = without_hidden_keys(self._pruned(self.state, new), new)
            changed = await self._change(source, new, state)
            self._report_deferred()
            return changed

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[Callable[[], None]]:
        """Block changes and operations inside the context. Calling the yielded function blocks them
        permanently: another program makes all changes from then on."""
        keeps = False

        def keep() -> None:
            nonlocal keeps
            keeps = True

        await self.operation_lock.acquire()
        try:
            await self._lock.acquire()
            try:
                yield keep
            finally:
                if not keeps:
                    self._lock.release()
        finally:
            if not keeps:
                self.operation_lock.release()

    def adopt_state(self, state: SavedState) -> None:
        """Take over the state of another program, before `start`; the file may have an older
        one."""
        self.state = state
        self.config = with_saved_keys(self.config, state)

    async def wait_predecessor_gone(self) -> None:
        """Wait until the program before an upgrade serves no more requests. A weight operation must
        not run before that, because it can't pause or drain those requests."""
        if self.predecessor is not None:
            self.predecessor.close_idle_connections()
            await self.predecessor.wait_gone()
            self.predecessor = None

    async def release_membership(self) -> None:
        """Release the membership lock, and apply the change that was deferred."""
        self.membership_lock.release()
        async with self._lock:
            new, self._deferred = self._deferred, None
            if new is not None and not self.membership_lock.held:
                state = self._pruned(self.state, new)
                await self._change("file", with_saved_keys(new, state), state)
            self._report_deferred()

    async def change(
        self, edit: Edit, if_match: str | None = None, *, at_once: bool = False, own: bool = True
    ) -> ChangeResult:
        """Edit the saved state: workers, switches and keys that were set over HTTP. Without `own`,
        `on_change` is not called.

        An exception of `edit` propagates, and nothing changes. Raises HttpError 503 if the
        membership lock is held for too long.
        """
        deadline = trio.current_time() + self.config.admin.lock_timeout_secs
        while True:
            async with self._exclusive(at_once=at_once):
                if not self._matches(if_match):
                    return ChangeResult("precondition_failed", self.revision)
                state = self._pruned(self._edited(edit), self.config)
                if not self.membership_lock.held or not self._changes_membership(
                    self.config, state
                ):
                    before = self.state
                    new = with_saved_keys(self.config, state)
                    result = await self._change("api", new, state)
                    if own and result.outcome == "applied":
                        self.on_change(before, self.state)
                    return result
            await self.membership_lock.wait_released_within(deadline - trio.current_time())

    async def follow_found(self, found: Callable[[], tuple[FoundWorker, ...]]) -> None:
        """Apply the workers that discovery has found; `found` is called when the change runs. They
        are not configuration, so `revision` is not incremented."""
        while True:
            async with self._exclusive():
                if not self.membership_lock.held:
                    self._found = found()
                    self.state = self._pruned(self.state, self.config)
                    desired = self._desired(self.config, self.state)
                    await trio.lowlevel.checkpoint()  # two short steps instead of a long one
                    self.fleet.apply(desired, datetime.now(UTC))
                    self._warn_of_unnamed(desired)
                    await self._state_writer.save(self.state_file, self.state)
                    break
            await self.membership_lock.wait_released()
        await self.fleet.await_replicated()

    def _desired(self, config: Config, state: SavedState) -> tuple[WorkerSpec, ...]:
        return desired_workers(config, self.startup.flag_workers, state, self._found_by(config))

    def _pruned(self, state: SavedState, config: Config) -> SavedState:
        return prune_state(state, config, self.startup.flag_workers, self._found_by(config))

    def _edited(self, edit: Edit) -> SavedState:
        """The saved state after an edit over HTTP."""
        state = edit(self.state, self.config)
        if not self._found or state is self.state:
            return state
        return bind_to_found(state, self._desired(self.config, self.state), self._found)

    def _found_by(self, config: Config) -> tuple[FoundWorker, ...]:
        """The workers found by the sources that `config` has."""
        names = {entry.name for entry in config.discover}
        return tuple(worker for worker in self._found if worker.discovered.source in names)

    async def save_voices(self, voices: SavedVoices) -> None:
        """Save the uploaded voices. They are not configuration, so `revision` stays the same."""
        if voices == self.state.voices and not self.state_error:
            return
        async with self._lock:
            self.state = replace(self.state, voices=voices)
            await self._state_writer.save(self.state_file, self.state)

    @asynccontextmanager
    async def _exclusive(self, *, at_once: bool = False) -> AsyncIterator[None]:
        if (
            at_once
            or self.membership_lock.held
            or not await self.membership_lock.acquire_unless_held(self.operation_lock)
        ):
            async with self._lock:
                yield
            return
        try:
            async with self._lock:
                yield
        finally:
            self.operation_lock.release()

    def _without_deferred(self, new: Config) -> Config:
        """`new` without changes of the set of workers while the membership lock is held; these are
        kept for its release."""
        state = self._pruned(self.state, new)
        changes_membership = new.launch != self.config.launch or self._changes_membership(
            new, state
        )
        self._deferred = new if self.membership_lock.held and changes_membership else None
        if self._deferred is None:
            return new
        same = self.config
        return replace(new, workers=same.workers, launch=same.launch, discover=same.discover)

    def _changes_membership(self, config: Config, state: SavedState) -> bool:
        desired = self._desired(config, state)
        return {spec.url for spec in desired} != {worker.url for worker in self.fleet.workers}

    def _report_deferred(self) -> None:
        if self._deferred is not None:
            reason = self.membership_lock.reason()
            waits = f"[[workers]], [[launch]] and [[discover]] wait for the end of a sync: {reason}"
            self.last_reload = {**self.last_reload, "waits": waits}
            _log.info("config_deferred reason=%s", self.membership_lock.reason())
        else:
            self.last_reload.pop("waits", None)

    async def _change(self, source: str, new: Config, state: SavedState) -> ChangeResult:
        changes = diff(self.config, new)
        if new == self.config and state == self.state and not self._failures:
            # Not logged: the file watcher may reload a file that a request has already applied.
            is_repeat = source == "file" and "error" not in self.last_reload
            self._note("unchanged", source, keep=is_repeat or source == "api")
            await self._state_writer.save(self.state_file, state)
            return ChangeResult("unchanged", self.revision)
        try:
            commits = [prepare(new) for prepare in self._prepares]
        except OSError as error:
            return self._refuse(source, self._bind_error(new, error))
        except ConfigError as error:
            return self._refuse(source, error)
        self._apply(new, state, commits)
        if source != "api":
            self._note("applied", source, changes)
            _log.info("config_applied source=%s revision=%d", source, self.revision)
        self._note_failures()
        await self._state_writer.save(self.state_file, state)
        applied = ChangeResult("applied", self.revision, changes)
        await self.fleet.await_replicated()
        return applied

    def _apply(self, new: Config, state: SavedState, commits: list[Callable[[], None]]) -> None:
        """Atomic: there is no checkpoint between the first change and the last. The exception of a
        step is added to `_failures`, and the other steps still run."""
        self.config, self.state = new, state
        self.state_file = state_path(self.startup, new)
        self.revision += 1
        self._failures.clear()
        self.fleet.thresholds = thresholds_of(
            new, probe_failures_only=self.startup.dialect != "omni"
        )
        desired = self._desired(new, state)
        self._attempt(partial(self.fleet.apply, desired, datetime.now(UTC)))
        self._warn_of_unnamed(desired)
        for commit in commits:
            self._attempt(commit)
        for callback, applied in self._subscribers.items():
            if self._attempt(partial(callback, applied, new)):
                self._subscribers[callback] = new

    def _warn_of_unnamed(self, desired: Iterable[WorkerSpec]) -> None:
        before, self._unnamed = self._unnamed, {worker.url for worker in unnamed_workers(desired)}
        new = sorted(self._unnamed - before)
        if new:
            _log.warning(
                "workers_without_model workers=%d first=%s effect=%s hint=%s",
                len(new), new[0], "no request that names a model, because others have one",
                "set model, model_label, or [routing] model",
            )  # fmt: skip

    def _attempt(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except Exception as error:
            _log.exception("config_subscriber_failed")
            self._failures.append(error)
            return False
        return True

    def _note_failures(self) -> None:
        self.last_reload.pop("incomplete", None)
        if self._failures:
            texts = [f"{type(error).__name__}: {error}" for error in self._failures]
            self.last_reload["incomplete"] = "; ".join(texts)

    def _matches(self, if_match: str | None) -> bool:
        """RFC 9110 13.1.1, with one strong tag or `*`."""
        if if_match is None or if_match.strip() == "*":
            return True
        tags = [tag.strip().strip('"') for tag in if_match.split(",")]
        return str(self.revision) in tags

    def _refuse(self, source: str, error: ConfigError) -> ChangeResult:
        self._note("refused", source)
        self.last_reload["error"] = {"message": str(error), **error.as_dict()}
        _log.error("config_refused source=%s action=kept_current\n%s", source, error)
        return ChangeResult("refused", self.revision, error=error)

    def _bind_error(self, new: Config, error: OSError) -> ConfigError:
        where = error.filename or f"{new.server.host}:{new.server.port}"
        keys = {new.admin.listen: "admin.listen", new.admin.metrics_listen: "admin.metrics_listen"}
        key = keys.get(where, "server.port")
        reason = f"cannot listen on {where}: {error.strerror or error}"
        return ConfigError([Problem(key, None, reason, file=str(self.file))], str(self.file))

    def _note(
        self,
        outcome: str,
        source: str,
        changes: dict[str, Any] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Count an outcome, and record it as the last reload unless `keep`: a change over HTTP is
        not a reload and must not clear the record of a refused one."""
        self.reloads[outcome, source] += 1
        if not keep:
            now = datetime.now(UTC).isoformat()
            self.last_reload = {
                "outcome": outcome,
                "source": source,
                "diff": changes or {},
                "at": now,
            }
