"""The running program's side of an upgrade: starts the new program, hands over, drains.

    start -> started (valid configuration) -> changes are locked -> state and sockets
          -> ready (it accepts) -> services end -> commit -> drain

Invariant: until `commit` any failure ends the new program, and this one continues as before. After
it this one changes nothing: configuration and weights stay locked, and control requests on its
connections are relayed to the new program. Operations on weights never overlap an upgrade.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from msgspec.structs import replace

from omni_proxy import __version__
from omni_proxy.config.state import render_state
from omni_proxy.fleet.cordon_reasons import CHANGING_CORDONS
from omni_proxy.launch.child_process import HandedReplica
from omni_proxy.picker.reservations import ReservationRecord
from omni_proxy.routing.policies.session_load import OwnSessions
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.supervisor import Supervisor
from omni_proxy.upgrade.child_program import NewProgram, NewProgramFailed, new_program_argv
from omni_proxy.upgrade.program_parts import ProgramParts
from omni_proxy.upgrade.state import (
    FORMATS,
    WITH_TREES,
    CallerRecord,
    CloseIdleMessage,
    CommitMessage,
    HandoverState,
    ListenerRecord,
    ReadyMessage,
    StartedMessage,
    StateMessage,
    worker_records,
)
from omni_proxy.upgrade.tree_handover import save_all

_log = logging.getLogger(__name__)

BUSY_POLL_SECS: Final = 0.1
STEP_SECS: Final = 0.5  # step in which the time of an upgrade is counted
MAX_SESSIONS: Final = 50_000  # limit, because the state is built in one turn of the event loop
STOP_SECS: Final = 5.0  # timeout for services to end
ADMIN_SECS: Final = 1.0  # time for control requests in flight
# Services that run until the last connection has ended.
KEPT_SERVICES: Final = frozenset(
    (
        "access_log", "route_log", "audit_log", "log_file", "spans", "ticker", "upgrade",
        "admin_api", "picker", "envoy",
    )
)  # fmt: skip

SHUTTING_DOWN: Final = "this program is shutting down"

Report = Callable[[str], None]
StartSoon = Callable[[Callable[[], Awaitable[None]]], None]


class UpgradeFailed(Exception):
    """The upgrade failed, and this program continues; the text has the reason."""


class Outgoing:
    """Runs upgrades, one after the other; the first that succeeds is the last."""

    def __init__(self, parts: ProgramParts, start_soon: StartSoon) -> None:
        self._parts = parts
        self._start_soon = start_soon
        self._successor: NewProgram | None = None
        self.running = self.handed_over = self._stopped = False
        self._scope = trio.CancelScope()  # scope of the running upgrade
        self.last_error = ""

    def status(self) -> dict[str, object]:
        """For GET /status."""
        state = "running" if self.running else "handed_over" if self.handed_over else "idle"
        return {"state": state, "last_error": self.last_error or None}

    async def upgrade(self, binary: str | None, report: Report) -> int:
        """Upgrade; return the new program's pid. Raises UpgradeFailed; then nothing changed."""
        reason = self._refusal(binary)
        if reason:
            raise UpgradeFailed(reason)
        self.running = True
        timeout_secs = self._parts.config_store.config.server.upgrade_timeout_secs
        _log.info("upgrade_started binary=%s timeout=%gs", binary or "same", timeout_secs)
        try:
            with trio.CancelScope() as self._scope:
                self._start_soon(partial(self._end_late, self._scope, timeout_secs))
                pid = await self._start_and_hand_over(binary, report)
                _log.info("upgrade_done pid=%d", pid)
                return pid
            if self._stopped:
                raise UpgradeFailed(SHUTTING_DOWN)
            waits = self._busy()
            why = f": an operation on weights is still running: {waits}" if waits else ""
            raise UpgradeFailed(f"the new program was not ready within {timeout_secs:g} s{why}")
        except UpgradeFailed as error:
            self.last_error = str(error)
            _log.error("upgrade_failed error=%s", str(error))
            raise
        finally:
            self.running = False

    async def _end_late(self, scope: trio.CancelScope, secs: float) -> None:
        """Cancel an upgrade after `secs`.

        Time in which this program was stopped (SIGSTOP) does not count, because the new program
        may have accepted connections during it.
        """
        while secs > 0 and self.running and scope is self._scope:
            await trio.sleep(min(secs, STEP_SECS))
            secs -= STEP_SECS
        if self.running and scope is self._scope:
            scope.cancel()

    def stop(self) -> None:
        """Cancel the upgrade, because this program shuts down."""
        self._stopped = True
        self._scope.cancel()

    def end(self) -> None:
        """Close the connection to the new program, after this program's last request."""
        if self._successor is not None:
            self._successor.close()

    def _refusal(self, binary: str | None) -> str:
        if self.running:
            return "an upgrade is running already"
        if self.handed_over or self._stopped:
            return SHUTTING_DOWN
        if os.getpid() == 1:
            return (
                "this program is process 1 of its container, which ends with it: replace the "
                "container instead"
            )
        if sys.argv[1:2] == ["router-process"]:
            return "this program ends with the one that called launch_router: restart that one"
        if binary is not None and not os.access(binary, os.X_OK):
            return f"{binary} is not an executable file"
        if reason := self._busy_for_long():
            return f"weights may not be changed during an upgrade: {reason}"
        return ""

    async def _start_and_hand_over(self, binary: str | None, report: Report) -> int:
        argv = new_program_argv(binary)
        report(f"starting {' '.join(argv)}")
        try:
            environ = os.environ | self._parts.service_manager.variables
            new = await NewProgram.start(argv, environ)
        except OSError as error:
            raise UpgradeFailed(f"cannot start {argv[0]}: {error.strerror or error}") from None
        self._start_soon(new.forward_output)
        try:
            return await self._hand_over(new, report)
        except NewProgramFailed as error:
            raise UpgradeFailed(f"the new program failed: {error}") from None
        finally:
            if not self.handed_over:
                await new.kill()

    async def _hand_over(self, new: NewProgram, report: Report) -> int:
        """Hand over to a started program; return its pid. Raises like `_commit`."""
        started, _ = await new.receive(StartedMessage)
        if not set(FORMATS) & set(started.formats):
            raise UpgradeFailed(
                f"version {started.version} reads states of format "
                f"{_listed(started.formats)}, and this program writes {_listed(FORMATS)}"
            )
        report(f"version {started.version} has started, and accepts the configuration")
        store = self._parts.config_store
        await self._wait_quiet(report)
        async with store.frozen() as keep_frozen:
            if busy := self._busy():  # an operation began during the wait for the lock
                raise UpgradeFailed(f"an operation on weights has begun: {busy}")
            with ExitStack() as stack:
                state, descriptors = self._collect(stack)
                state = await self._with_shared(state)
                if WITH_TREES in started.formats:
                    state, trees = await self._with_trees(state, stack)
                    descriptors += trees
                await new.send(StateMessage(state), descriptors)
            ready, _ = await new.receive(ReadyMessage)
            report(f"process {ready.pid} accepts connections")
            with trio.CancelScope(shield=True):
                await self._commit(new, ready, [replica.pid for replica in state.replicas])
                keep_frozen()
            report("this program ends when its last request has ended")
            return ready.pid

    async def _wait_quiet(self, report: Report) -> None:
        reported = ""
        while busy := self._busy():
            if busy != reported:
                reported = busy
                report(f"waiting for an operation on weights: {busy}")
            await trio.sleep(BUSY_POLL_SECS)

    def _busy(self) -> str:
        """Description of a running operation on weights; "" if there is none."""
        operation = self._parts.weight_operations.queue.current
        if operation is not None:
            return operation.route.path
        changing = [
            worker.url
            for worker in self._parts.fleet.workers
            if worker.cordon_reasons & CHANGING_CORDONS
        ]
        return f"{changing[0]} is being updated" if changing else self._busy_for_long()

    def _busy_for_long(self) -> str:
        operations = self._parts.weight_operations
        if operations.journal.in_group:
            return f"a trainer has a group with the workers: {operations.sync.lifecycle.describe()}"
        return "a rollout is in progress" if operations.journal.rollout is not None else ""

    def _collect(self, stack: ExitStack) -> tuple[HandoverState, list[int]]:
        """Collect the state, and descriptors in the order of its records; `stack` closes them."""
        parts = self._parts
        by_address = parts.data_plane.listeners.dup_sockets()
        socks = [stack.enter_context(sock) for sock in by_address.values()]
        group = parts.process_manager.dup_sockets()
        if group is not None:
            socks += [stack.enter_context(sock) for sock in group.sockets.values()]
        listeners = ListenerRecord(
            addresses=tuple(by_address),
            slots=tuple(group.sockets) if group else (),
            group=group.group if group else (),
            steered=group.steered if group else (),
        )
        replicas = parts.launcher.hand_over()
        descriptors = [sock.fileno() for sock in socks]
        for replica in replicas:
            stack.callback(replica.close)
            descriptors += [replica.pidfd, replica.output]
        launch = parts.config_store.startup.launch
        sessions = {
            role: tuple(policy.session_rows(MAX_SESSIONS))
            for role, policy in parts.data_plane.policies().items()
            if isinstance(policy, Sticky)
        }
        owners = parts.data_plane.balancer.response_owners
        state = HandoverState(
            version=__version__,
            listeners=listeners,
            saved=render_state(parts.config_store.state),
            launch=tuple(msgspec.to_builtins(entry) for entry in launch),
            workers=worker_records(parts.fleet),
            replicas=tuple(replica.record for replica in replicas),
            sessions=sessions.pop("regular", ()),
            pool_sessions=sessions,
            callers=self._caller_records(),
            response_owners=tuple(owners.rows(MAX_SESSIONS))
            if isinstance(owners, OwnSessions)
            else (),
        )
        return state, descriptors

    def _caller_records(self) -> dict[str, CallerRecord]:
        now = time.monotonic()
        records: dict[str, CallerRecord] = {}
        for caller in self._parts.data_plane.settings.callers:
            if caller.has_rates:
                requests, tokens = caller.rate_rows(now)
                records[caller.name] = CallerRecord(requests=requests, tokens=tokens)
        return records

    async def _with_shared(self, state: HandoverState) -> HandoverState:
        """The state with the sessions that several processes share."""
        tables = self._parts.process_manager.session_tables
        if not tables:
            return state
        rows = [await trio.to_thread.run_sync(table.rows, MAX_SESSIONS) for table in tables]
        return replace(state, shared_sessions=rows[0], shared_response_owners=rows[1])

    async def _with_trees(
        self, state: HandoverState, stack: ExitStack
    ) -> tuple[HandoverState, list[int]]:
        """The state with the current prefix trees, and their descriptors."""
        files = await save_all(self._parts, stack)
        if not files:
            return state, []
        seed = self._parts.tree_seed
        changed = replace(state, format=WITH_TREES, tree_files=tuple(files), tree_seed=seed)
        return changed, list(files.values())

    async def _commit(self, new: NewProgram, ready: ReadyMessage, replicas: Sequence[int]) -> None:
        """Commit: the new program, which is ready, takes over.

        `replicas`: pids of the handed-over replicas. Raises NewProgramFailed if the new program has
        ended, UpgradeFailed if descriptors can't be duplicated; then this program continues.
        """
        parts = self._parts
        kept_replicas = self._keep_replicas(replicas)
        self.handed_over = True
        parts.service_manager.silent = True
        parts.launcher.release(replicas)
        ending = [row for row in parts.supervisors() if row.name not in KEPT_SERVICES]
        with trio.move_on_after(STOP_SECS):
            async with trio.open_nursery() as nursery:
                for supervisor in ending:
                    nursery.start_soon(supervisor.stop)
        reservations = parts.picker().hand_over(ready.admin_socket)
        try:
            await new.send(CommitMessage(reservations))
        except NewProgramFailed:
            self._resume_services(ending, kept_replicas, reservations)
            raise
        for replica in kept_replicas:
            replica.close()
        self._successor = new
        _redirect(parts.admin_socket, ready.admin_socket)
        parts.data_plane.listeners.keep_files()
        parts.process_manager.begin_drain(keeps_idle=True)
        parts.picker().begin_drain()
        self._start_soon(self._follow_successor)
        self._start_soon(self._end_admin_api)
        parts.leave()
        with trio.move_on_after(ADMIN_SECS):  # then control requests reach the new program
            await parts.process_manager.acknowledged()

    def _keep_replicas(self, pids: Sequence[int]) -> list[HandedReplica]:
        """Duplicates of the handed-over replicas, to continue with them if the commit fails.

        Raises UpgradeFailed.
        """
        try:
            replicas = self._parts.launcher.hand_over()
        except OSError as error:
            raise UpgradeFailed(f"launched replicas: {error.strerror}") from None
        for replica in replicas:
            if replica.record.pid not in pids:
                replica.close()
        return [replica for replica in replicas if replica.record.pid in pids]

    def _resume_services(
        self,
        ended: Iterable[Supervisor],
        replicas: Iterable[HandedReplica],
        reservations: Sequence[ReservationRecord],
    ) -> None:
        """Continue after a failed commit: restart the ended services."""
        parts = self._parts
        self.handed_over = False
        parts.service_manager.silent = False
        targets = {target.url: target for target in parts.fleet.targets()}
        parts.picker().successor = ""
        parts.picker().restore(reservations, targets)
        parts.launcher.adopt(replicas)
        for supervisor in ended:
            supervisor.resume()

    async def _follow_successor(self) -> None:
        """Execute requests of the new program, until it ends."""
        successor = self._successor
        while successor is not None:
            try:
                await successor.receive(CloseIdleMessage)
            except NewProgramFailed:
                return
            self._parts.process_manager.begin_drain()

    async def _end_admin_api(self) -> None:
        """End the admin API after running control requests; later ones reach the new program."""
        await trio.sleep(ADMIN_SECS)
        for supervisor in self._parts.supervisors():
            if supervisor.name == "admin_api":
                await supervisor.stop()


def _listed(formats: Iterable[int]) -> str:
    return ", ".join(map(str, formats))


def _redirect(path: Path, target: str) -> None:
    """Make `path` a link to `target`, so that new connections reach that socket."""
    link = path.with_name(f"{path.name}.next")
    try:
        link.symlink_to(target)
        link.replace(path)
    except OSError as error:
        _log.warning("admin_socket_not_redirected path=%s error=%s", path, error.strerror)
