"""The new program's side of an upgrade: takes over sockets and state of the running program.

Order: `wait_state` (after the configuration was validated, before services exist), `inherit` before
addresses are bound, `take_over` after that. Invariants: no connection is accepted before the
fleet's state is restored; until the running program commits, this one changes nothing that outlives
it: it writes no journal and no state file, removes no socket file, and supervises no replica. If
the running program is killed, this one continues with the state it has received, because no other
program would serve. If the running program only gives up the upgrade, this one ends.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec
import trio

from omni_proxy import __version__
from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.fields import Role
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.config.state import read_state
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.launch.child_process import HandedReplica
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.multiprocess.reuseport_group import GroupSockets
from omni_proxy.picker.reservations import ReservationRecord
from omni_proxy.routing.policies.session_load import SessionRow
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.supervisor import Supervisor
from omni_proxy.upgrade.child_program import ENVIRONMENT, ChannelClosed, HandoverChannel
from omni_proxy.upgrade.program_parts import ProgramParts
from omni_proxy.upgrade.state import (
    FORMATS,
    CloseIdleMessage,
    CommitMessage,
    HandoverState,
    ReadyMessage,
    StartedMessage,
    StateMessage,
    UnreadableMessage,
    missing_workers,
    restore_workers,
)
from omni_proxy.upgrade.tree_handover import load_all

_log = logging.getLogger(__name__)

FOUND_SECS: Final = 5.0  # time for discovery to find the workers of the running program
POLL_SECS: Final = 0.02
KILLED_SECS: Final = 2.0


class NoState(Exception):
    """The running program continues without this one, or its state can't be read."""


class PredecessorKilled(Exception):
    """The running program ended before it handed over its state."""


class NotReady(Exception):
    """This program can't take over; the running one continues."""


class Incoming:
    """The takeover, from this program's first message to the end of the other program.

    `killed_secs`: a killed program ends at most this long after its connection."""

    def __init__(
        self, channel: HandoverChannel, stderr: int, killed_secs: float = KILLED_SECS
    ) -> None:
        self.state = HandoverState()
        self._killed_secs = killed_secs
        self._channel = channel
        self._predecessor = channel.peer_process()
        self._stderr = stderr
        self._socks: list[socket.socket] = []
        self._replicas: list[HandedReplica] = []
        self._trees: dict[int, int] = {}  # descriptors of prefix trees, by process index
        self._reservations: tuple[ReservationRecord, ...] = ()
        self._gone = trio.Event()
        self._offered = self._declined = self._answered = False
        # This program has shut the connection; the running program has given up the upgrade.
        self._shut = self._given_up = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Incoming | None:
        """The takeover; None if this program was not started by an upgrade."""
        numbers = environ.pop(ENVIRONMENT, "").split()
        if len(numbers) != 2:
            return None
        sock, stderr = map(int, numbers)
        os.set_inheritable(stderr, False)
        return cls(HandoverChannel(socket.socket(fileno=sock)), stderr)

    def wait_state(self, startup: Startup) -> Startup:
        """Report that the configuration is valid, and wait for the state. Blocks.

        Returns the startup to continue with, which has the running replicas. Raises NoState,
        PredecessorKilled.
        """
        try:
            self._channel.send(StartedMessage(FORMATS, __version__))
            message, descriptors = self._channel.receive()
        except ChannelClosed as error:
            if self._predecessor.has_ended(self._killed_secs):
                raise PredecessorKilled from None
            raise NoState(f"the running program has ended the upgrade: {error}") from None
        except UnreadableMessage as error:
            raise NoState(f"the running program's state can't be read: {error}") from None
        if not isinstance(message, StateMessage) or message.state.format not in FORMATS:
            raise NoState("the running program's state has a format that this version can't read")
        self.state = message.state
        record = self.state.listeners
        count = len(record.addresses) + len(record.slots)
        if self.state.tree_files:
            start = len(descriptors) - len(self.state.tree_files)
            self._trees = dict(zip(self.state.tree_files, descriptors[start:], strict=True))
            del descriptors[start:]
        self._socks = [socket.socket(fileno=number) for number in descriptors[:count]]
        pairs = zip(descriptors[count::2], descriptors[count + 1 :: 2], strict=True)
        self._replicas = [
            HandedReplica(replica, pidfd, output)
            for replica, (pidfd, output) in zip(self.state.replicas, pairs, strict=True)
        ]
        for sock in self._socks:
            sock.setblocking(False)
        if not startup.launch:
            return startup
        return _with_launch(startup, self.state)

    def continue_without_predecessor(self) -> None:
        """Continue without the running program, which has ended."""
        self._take_stderr()
        self._channel.close()
        self._predecessor.close()

    def _take_stderr(self) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)

    def adopt_state(self, config_store: ConfigStore) -> None:
        """Adopt changes that were made over HTTP. Raises ConfigError."""
        config_store.adopt_state(read_state(self.state.saved.encode(), "the running program"))

    def inherit(self, data_plane: DataPlane, process_manager: ProcessManager) -> None:
        """Provide the received sockets to listeners, which use those of configured addresses."""
        record = self.state.listeners
        count = len(record.addresses)
        data_plane.listeners.inherited.update(
            zip(record.addresses, self._socks[:count], strict=True)
        )
        if record.slots:
            sockets = dict(zip(record.slots, self._socks[count:], strict=True))
            process_manager.inherited = GroupSockets(sockets, record.group, record.steered)

    async def take_over(
        self, parts: ProgramParts, root: trio.Nursery, envoy: Iterable[Supervisor]
    ) -> None:
        """Restore the state, accept connections, and wait until the running program commits.

        Call it when addresses are bound. `envoy`: services that start when picks can be made:
        Envoy must reach them before the running program stops accepting. Raises NotReady.
        """
        parts.data_plane.listeners.drop_inherited()
        parts.process_manager.inherited.close()
        parts.process_manager.inherited = GroupSockets()
        await self._wait_found(parts)
        count = restore_workers(parts.fleet, self.state.workers)
        self._restore_sessions(parts.data_plane)
        self._restore_callers(parts.data_plane)
        await self._restore_trees(parts)
        self._open(parts.process_manager)
        for slot in list(parts.process_manager.slots.values()):
            while slot.handle is None or not slot.handle.accepts:  # noqa: ASYNC110
                await trio.sleep(POLL_SECS)
        self._restore_shared(parts)
        for supervisor in envoy:
            await root.start(supervisor.run)
        if not parts.picker().listens:
            address = parts.config_store.config.picker.grpc_listen
            raise NotReady(f"cannot listen for Envoy on {address}")
        if self._declined:
            await trio.sleep_forever()  # until the shutdown cancels this
        self._offered = True
        with suppress(ChannelClosed):  # no commit can arrive then, which is handled below
            await trio.to_thread.run_sync(
                self._channel.send, ReadyMessage(os.getpid(), str(parts.admin_socket))
            )
        await self._wait_commit(parts)
        targets = {target.url: target for target in parts.fleet.targets()}
        parts.picker().restore(self._reservations, targets)
        parts.config_store.predecessor = self
        _log.info("upgrade_taken_over version=%s workers=%d", self.state.version, count)

    def decline(self) -> bool:
        """Decline the takeover because this program shuts down; the running one continues.

        Returns False if this program has reported that it is ready, and may already have the
        state.
        """
        self._declined = not self._offered
        return self._declined

    async def _wait_found(self, parts: ProgramParts) -> None:
        """Wait until discovery has found the running program's workers.

        Raises NotReady if workers are missing and a source has not answered: it may have them.
        """
        with trio.move_on_after(FOUND_SECS):
            while missing_workers(parts.fleet, self.state.workers):
                if not parts.config_store.config.discover:
                    return
                await trio.sleep(POLL_SECS)
        missing, unlisted_sources = (
            missing_workers(parts.fleet, self.state.workers),
            parts.unlisted_sources(),
        )
        if missing and unlisted_sources:
            raise NotReady(
                f"discovery has not found {len(missing)} workers of the running program within "
                f"{FOUND_SECS:g} s, and got no list from {', '.join(unlisted_sources)}"
            )

    def _open(self, process_manager: ProcessManager) -> None:
        """Accept connections. Raises NotReady."""
        try:
            process_manager.open()
        except OSError as error:  # another program listens at an address new in the configuration
            raise NotReady(f"cannot listen: {error.strerror or error}") from None

    def _restore_sessions(self, data_plane: DataPlane) -> None:
        """Restore sessions of policies, and the owners of stored responses."""
        targets = {target.url: target for target in data_plane.fleet.targets()}
        sessions: dict[Role, tuple[SessionRow, ...]] = {"regular": self.state.sessions}
        for role, rows in (sessions | self.state.pool_sessions).items():
            policy = data_plane.policy_of(role)
            if rows and isinstance(policy, Sticky):
                policy.restore_sessions(rows, targets.get)
        owners = data_plane.balancer.response_owners
        for key, url, used in self.state.response_owners:
            worker = targets.get(url)
            if worker is not None:
                owners.keep(key, worker, used)

    def _restore_callers(self, data_plane: DataPlane) -> None:
        for caller in data_plane.settings.callers:
            taken = self.state.callers.get(caller.name)
            if taken is not None:
                caller.restore(taken.requests, taken.tokens, time.monotonic())

    async def _restore_trees(self, parts: ProgramParts) -> None:
        try:
            await load_all(parts, self._trees)
        finally:
            while self._trees:
                os.close(self._trees.popitem()[1])

    def _restore_shared(self, parts: ProgramParts) -> None:
        """Restore sessions that several processes shared, if there are several again."""
        targets = {target.url: target for target in parts.fleet.targets()}
        handed = self.state.shared_sessions, self.state.shared_response_owners
        for table, rows in zip(parts.process_manager.session_tables, handed, strict=False):
            if rows is not None:
                table.restore(rows, targets.get)

    async def _wait_commit(self, parts: ProgramParts) -> None:
        """Wait for the commit, by which this program owns everything.

        If it is cancelled, either the running program can't commit any more and continues, or the
        commit has arrived and the launcher has the replicas. Raises NotReady if the running program
        has given up.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._shut_when_cancelled)
            with trio.CancelScope(shield=True):
                error = await trio.to_thread.run_sync(self._receive_commit)
            cancelled = trio.current_effective_deadline() == -math.inf
            if not error or not (cancelled or self._given_up):
                parts.launcher.adopt(self._replicas)
            self._answered = True
            nursery.cancel_scope.cancel()
        if self._given_up:
            raise NotReady(f"the running program has ended the upgrade, and continues: {error}")
        self._take_stderr()
        if error:
            _log.error("upgrade_commit_missing reason=%s other_program=ended", error)

    async def _shut_when_cancelled(self) -> None:
        """Shut the connection on cancellation: a message that has arrived stays readable, and the
        other side can't send another one."""
        try:
            await trio.sleep_forever()
        finally:
            if not self._answered:
                self._shut = True
                self._channel.wake_receivers()

    def _receive_commit(self) -> str:
        """Receive the commit; return "" or why there was none. Blocks."""
        try:
            message, _ = self._channel.receive()
        except ChannelClosed as error:
            self._given_up = not self._shut and not self._predecessor.has_ended(self._killed_secs)
            return str(error)
        except UnreadableMessage as error:
            return str(error)
        if not isinstance(message, CommitMessage):
            return f"{type(message).__name__} instead of CommitMessage"
        self._reservations = message.reservations
        return ""

    async def follow_predecessor(self) -> None:
        """Wait until the previous program has ended, after its last request."""
        with suppress(ChannelClosed, UnreadableMessage):
            await trio.to_thread.run_sync(self._channel.receive, abandon_on_cancel=True)
        self._channel.close()
        self._predecessor.close()
        _log.info("upgrade_predecessor_ended")
        self._gone.set()

    def close_idle_connections(self) -> None:
        """Make the previous program close its idle connections."""
        try:
            self._channel.send(CloseIdleMessage())
        except ChannelClosed:
            return  # it has ended

    async def wait_gone(self) -> None:
        await self._gone.wait()


def take_state(incoming: Incoming, startup: Startup) -> tuple[Startup, Incoming | None]:
    """The startup to continue with, and the takeover.

    If the running program was killed, this is an ordinary start without a takeover. Blocks. Raises
    NoState.
    """
    try:
        return incoming.wait_state(startup), incoming
    except PredecessorKilled:
        incoming.continue_without_predecessor()
        warning = "upgrade_predecessor_killed: it handed over nothing, so this is an ordinary start"
        return replace(startup, warnings=(*startup.warnings, warning)), None


def _with_launch(startup: Startup, state: HandoverState) -> Startup:
    """Use the launch entries of the running replicas: new ones would get other ports."""
    names = LaunchEntry.__struct_fields__
    known = [{key: entry[key] for key in names if key in entry} for entry in state.launch]
    try:
        entries = tuple(msgspec.convert(entry, LaunchEntry) for entry in known)
    except msgspec.ValidationError as error:
        raise NoState(f"the launched replicas of the running program: {error}") from None
    return replace(startup, launch=entries)
