"""The keeper: what runs, kept in step with FILE, the state file and the flags.

Invariant: a configuration is applied whole or not at all. Everything that may fail (reading,
judging, opening a listener) happens before the first thing changes; what fails after that all the
same stops nothing else, is told, and makes the next reading apply the configuration again.
All changes, whoever asks, go through one lock and one path; `revision` rises with each that changed
something. While an operation on the workers has the `operation_lock` they wait, unless they are `at_once`;
while the set of workers is frozen, what FILE says of it is withheld and applied at the thaw.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import replace

from omni_proxy.config.diff import diff
from omni_proxy.config.flags import Startup
from omni_proxy.config.overlay import desired_workers, prune_state
from omni_proxy.config.parse import ConfigError, Problem, parse
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState, SavedVoices
from omni_proxy.fleet.health import thresholds_of
from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.policies.plugins import check_policy
from omni_proxy.runtime_config.membership_lock import MembershipLock
from omni_proxy.runtime_config.state_file import StateFile, state_at, state_path
from omni_proxy.system.files import file_signature
from omni_proxy.system.tls_contexts import check_tls_files
from omni_proxy.upstream_http.own_address import reject_own_addresses

_log = logging.getLogger(__name__)

Prepare = Callable[[Config], Callable[[], None]]
Subscriber = Callable[[Config, Config], None]
Edit = Callable[[SavedState, Config], SavedState]


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """How a change ended: applied, unchanged, refused, or precondition_failed."""

    outcome: str
    revision: int
    diff: dict[str, Any] = field(default_factory=dict)
    error: ConfigError | None = None


def read_file(path: Path | None) -> Config:
    """FILE as it is now; defaults without one. Raises ConfigError, also for one that can't be
    read."""
    if path is None:
        return Config()
    return parse(_bytes_of(path), str(path))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = Problem("", None, f"cannot be read: {error.strerror}", file=str(path))
        raise ConfigError([problem], str(path)) from None


class ConfigStore:
    """Built from a configuration that was judged already; `start` puts it in force."""

    def __init__(self, startup: Startup, fleet: Fleet) -> None:
        """Raises ConfigError for FILE or the state file."""
        self.startup = startup
        self.fleet = fleet
        self.file = startup.config_path
        self.read_as = file_signature(self.file) if self.file else None  # FILE, as it is read here
        self.config = startup.effective_config(read_file(self.file))
        check_tls_files(self.config, str(self.file or ""))
        check_policy(self.config, str(self.file or ""))
        reject_own_addresses(self.config, startup.flag_urls, str(self.file or ""))
        self.state_file = state_path(startup, self.config)
        self.state = state_at(self.state_file)
        self._kept = StateFile(self.state_file, self.state)
        self.revision = 0
        self.last_reload: dict[str, Any] = {}
        self.reloads: Counter[tuple[str, str]] = Counter()  # outcome, source
        self.operation_lock = trio.Lock()  # before `_lock`, never inside it
        self.membership_lock = MembershipLock()
        self._withheld: Config | None = None  # what FILE says, while its workers have to wait
        self._lock = trio.Lock()
        self._prepares: list[Prepare] = []
        self._subscribers: dict[Subscriber, Config] = {}  # and what each has taken last
        self._failures: list[Exception] = []  # of the newest application

    @property
    def state_error(self) -> str:
        """Why the state is not on the disk; "" where it is."""
        return self._kept.error

    def add_prepare(self, prepare: Prepare) -> None:
        """`prepare(new)` does what may fail (OSError, ConfigError) and returns what puts it in
        force."""
        self._prepares.append(prepare)

    def subscribe(self, callback: Subscriber) -> None:
        """`callback(old, new)` after each applied change, `old` being what it took last: one that
        raises is told of the same difference again with the next reading."""
        self._subscribers[callback] = self.config

    def start(self) -> None:
        """Put the first configuration in force. Raises OSError where it can't be bound, and what
        any part raises."""
        self._apply(self.config, self.state, [prepare(self.config) for prepare in self._prepares])
        if self._failures:
            raise self._failures[0]
        self._note("started", "start")

    async def reload(self, source: str, if_match: str | None = None) -> ChangeResult:
        """Read FILE and apply it. Never raises for what the file says."""
        async with self._alone():
            if not self._matches(if_match):
                return ChangeResult("precondition_failed", self.revision)
            try:
                new = self.startup.effective_config(
                    await trio.to_thread.run_sync(read_file, self.file)
                )
                await trio.to_thread.run_sync(check_tls_files, new, str(self.file or ""))
                await trio.to_thread.run_sync(check_policy, new, str(self.file or ""))
                urls = self.startup.flag_urls
                await trio.to_thread.run_sync(reject_own_addresses, new, urls, str(self.file or ""))
            except ConfigError as error:
                return self._refused(source, error)
            new = self._without_waiting(new)
            state = prune_state(self.state, new, self.startup.flag_urls)
            changed = await self._change(source, new, state)
            self._tell_waiting()
            return changed

    async def release_membership(self) -> None:
        """The set of workers may change again; what waited for that happens now."""
        self.membership_lock.release()
        async with self._lock:
            new, self._withheld = self._withheld, None
            if new is not None and not self.membership_lock.held:
                state = prune_state(self.state, new, self.startup.flag_urls)
                await self._change("file", new, state)
            self._tell_waiting()

    async def change(
        self, edit: Edit, if_match: str | None = None, *, at_once: bool = False
    ) -> ChangeResult:
        """Edit the runtime state (worker CRUD). What `edit` raises passes through, changing
        nothing. Raises Refusal 503 where the set of workers stays frozen for too long."""
        waits_until = trio.current_time() + self.config.admin.lock_timeout_secs
        while True:
            async with self._alone(at_once=at_once):
                if not self._matches(if_match):
                    return ChangeResult("precondition_failed", self.revision)
                state = prune_state(
                    edit(self.state, self.config), self.config, self.startup.flag_urls
                )
                if not self.membership_lock.held or not self._moves_workers(self.config, state):
                    return await self._change("api", self.config, state)
            await self.membership_lock.wait_released_within(waits_until - trio.current_time())

    async def save_voices(self, voices: SavedVoices) -> None:
        """Keep what is known of uploaded voices: no setting, so the revision stays."""
        if voices == self.state.voices and not self.state_error:
            return
        async with self._lock:
            self.state = replace(self.state, voices=voices)
            await self._kept.keep(self.state_file, self.state)

    @asynccontextmanager
    async def _alone(self, *, at_once: bool = False) -> AsyncIterator[None]:
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

    def _without_waiting(self, new: Config) -> Config:
        """What of it may be applied now."""
        state = prune_state(self.state, new, self.startup.flag_urls)
        moves = new.launch != self.config.launch or self._moves_workers(new, state)
        self._withheld = new if self.membership_lock.held and moves else None
        if self._withheld is None:
            return new
        return replace(new, workers=self.config.workers, launch=self.config.launch)

    def _moves_workers(self, config: Config, state: SavedState) -> bool:
        wanted = desired_workers(config, self.startup.flag_urls, state)
        return {entry.url for entry in wanted} != {worker.url for worker in self.fleet.workers}

    def _tell_waiting(self) -> None:
        if self._withheld is not None:
            waits = f"[[workers]] and [[launch]] wait for the end of a sync: {self.membership_lock.reason()}"
            self.last_reload = {**self.last_reload, "waits": waits}
            _log.info("%s", waits)
        else:
            self.last_reload.pop("waits", None)

    async def _change(self, source: str, new: Config, state: SavedState) -> ChangeResult:
        told = diff(self.config, new)
        if new == self.config and state == self.state and not self._failures:
            # The watcher reads again what a request has applied: that says nothing new.
            seen = source == "file" and "error" not in self.last_reload
            self._note("unchanged", source, keep=seen or source == "api")
            await self._kept.keep(self.state_file, state)
            return ChangeResult("unchanged", self.revision)
        try:
            commits = [prepare(new) for prepare in self._prepares]
        except OSError as error:
            return self._refused(source, self._unbound(new, error))
        except ConfigError as error:
            return self._refused(source, error)
        self._apply(new, state, commits)
        if source != "api":
            self._note("applied", source, told)
            _log.info("configuration applied from %s, revision %d", source, self.revision)
        self._note_failures()
        await self._kept.keep(self.state_file, state)
        applied = ChangeResult("applied", self.revision, told)
        await self.fleet.await_replicated()
        return applied

    def _apply(self, new: Config, state: SavedState, commits: list[Callable[[], None]]) -> None:
        """One atom: no checkpoint between the first change and the last. Nothing here should fail;
        what does is noted in `_failures`, and all others still hear of the change."""
        self.config, self.state = new, state
        self.state_file = state_path(self.startup, new)
        self.revision += 1
        self._failures.clear()
        self.fleet.thresholds = thresholds_of(
            new, probe_failures_only=self.startup.dialect == "sglang"
        )
        wanted = desired_workers(new, self.startup.flag_urls, state)
        self._attempt(partial(self.fleet.apply, wanted, datetime.now(UTC)))  # or what watches it
        for commit in commits:
            self._attempt(commit)
        for callback, taken in self._subscribers.items():
            if self._attempt(partial(callback, taken, new)):
                self._subscribers[callback] = new

    def _attempt(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except Exception as error:
            _log.exception("a part of the program could not take the new configuration")
            self._failures.append(error)
            return False
        return True

    def _note_failures(self) -> None:
        self.last_reload.pop("incomplete", None)
        if self._failures:
            words = [f"{type(error).__name__}: {error}" for error in self._failures]
            self.last_reload["incomplete"] = "; ".join(words)

    def _matches(self, if_match: str | None) -> bool:
        """RFC 9110 13.1.1, with one strong tag or `*`."""
        if if_match is None or if_match.strip() == "*":
            return True
        tags = [tag.strip().strip('"') for tag in if_match.split(",")]
        return str(self.revision) in tags

    def _refused(self, source: str, error: ConfigError) -> ChangeResult:
        self._note("refused", source)
        self.last_reload["error"] = {"message": str(error), **error.as_dict()}
        _log.error("configuration from %s refused, keeping the current config:\n%s", source, error)
        return ChangeResult("refused", self.revision, error=error)

    def _unbound(self, new: Config, error: OSError) -> ConfigError:
        where = error.filename or f"{new.server.host}:{new.server.port}"
        key = "admin.listen" if where == new.admin.listen else "server.port"
        reason = f"cannot listen on {where}: {error.strerror or error}"
        return ConfigError([Problem(key, None, reason, file=str(self.file))], str(self.file))

    def _note(
        self,
        outcome: str,
        source: str,
        told: dict[str, Any] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """`keep` the last one: what HTTP changed is no reading of FILE, and clears no refusal."""
        self.reloads[outcome, source] += 1
        if not keep:
            at = datetime.now(UTC).isoformat()
            self.last_reload = {"outcome": outcome, "source": source, "diff": told or {}, "at": at}
