"""The new program's side of an upgrade: takes the sockets and the state of the running one.

Order: `wait_state` (before any service exists; it has the valid configuration by then), `inherit`
before the addresses are bound, `take_over` once they are. Invariants: nothing is accepted before
the fleet's state is restored; until the running program commits, this one changes nothing that
outlives it: it writes no journal and no state file, removes no socket's file, and supervises no
replica. If the running program is killed, this one goes on with what it has been given: nobody else
would serve. If that has only given up, this one ends.
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
from omni_proxy.config.fields import Role
from omni_proxy.config.flags import Startup
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.config.state import read_state
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.launch.handed_replica import HandedReplica
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.multiprocess.reuseport_group import GroupSockets
from omni_proxy.picker.reservations import ReservationRecord
from omni_proxy.routing.policies.session_load import SessionRow
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.supervisor import Supervisor
from omni_proxy.upgrade.channel import ChannelClosed, HandoverChannel
from omni_proxy.upgrade.fleet_state import missing_workers, restore_workers
from omni_proxy.upgrade.new_program import ENVIRONMENT
from omni_proxy.upgrade.parts import ProgramParts
from omni_proxy.upgrade.state import (
    FORMATS,
    CloseIdleMessage,
    CommitMessage,
    HandoverState,
    ReadyMessage,
    StartedMessage,
    StateMessage,
    UnreadableMessage,
)
from omni_proxy.upgrade.tree_handover import load_all

_log = logging.getLogger(__name__)

FOUND_SECS: Final = 5.0  # for discovery to find the workers that the running program has
POLL_SECS: Final = 0.02


KILLED_SECS: Final = 2.0  # from the end of the connection to that of a program that was killed


class NoState(Exception):
    """The running program goes on without this one, or its state can't be read."""


class PredecessorKilled(Exception):
    """The running program has ended, and has handed over nothing."""


class NotReady(Exception):
    """This program could not serve as the running one does, which goes on."""


class Incoming:
    """What this program takes over, from its first message to the end of the other program."""

    def __init__(self, channel: HandoverChannel, stderr: int) -> None:
        self.state = HandoverState()
        self._channel = channel
        self._predecessor = channel.creator()
        self._stderr = stderr
        self._socks: list[socket.socket] = []
        self._replicas: list[HandedReplica] = []
        self._trees: dict[int, int] = {}  # descriptors by the indexes of processes
        self._reservations: tuple[ReservationRecord, ...] = ()
        self._gone = trio.Event()
        self._offered = self._declined = self._answered = False
        self._shut = self._given_up = False  # the connection by this program; the upgrade

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Incoming | None:
        """None where no running program has started this one."""
        numbers = environ.pop(ENVIRONMENT, "").split()
        if len(numbers) != 2:
            return None
        sock, stderr = map(int, numbers)
        os.set_inheritable(stderr, False)
        return cls(HandoverChannel(socket.socket(fileno=sock)), stderr)

    def wait_state(self, startup: Startup) -> Startup:
        """The configuration is valid: get the state. Returns the startup to go on with, whose
        replicas are those that run already. Blocks. Raises NoState, PredecessorKilled."""
        try:
            self._channel.send(StartedMessage(FORMATS, __version__))
            message, descriptors = self._channel.receive()
        except ChannelClosed as error:
            if self._predecessor.has_ended(KILLED_SECS):
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

    def go_alone(self) -> None:
        """Nobody reads any more what this program prints, or answers it."""
        self._take_stderr()
        self._channel.close()
        self._predecessor.close()

    def _take_stderr(self) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)

    def adopt_state(self, config_store: ConfigStore) -> None:
        """What was changed over HTTP. Raises ConfigError."""
        config_store.adopt_state(read_state(self.state.saved.encode(), "the running program"))

    def inherit(self, data_plane: DataPlane, process_manager: ProcessManager) -> None:
        """The sockets are taken by the addresses that the configuration still has."""
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
        """Addresses are bound: go on with the fleet's state, accept, and wait until the running
        program has handed over everything. `envoy` is started once picks can be made, for Envoy
        must find it before the running program takes no more. Raises NotReady."""
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
            await trio.sleep_forever()  # until the shutdown has ended
        self._offered = True
        with suppress(ChannelClosed):  # then no commit comes, either
            await trio.to_thread.run_sync(
                self._channel.send, ReadyMessage(os.getpid(), str(parts.admin_socket))
            )
        await self._wait_commit(parts)
        targets = {target.url: target for target in parts.fleet.targets()}
        parts.picker().restore(self._reservations, targets)
        parts.config_store.predecessor = self
        _log.info("upgrade_taken_over version=%s workers=%d", self.state.version, count)

    def decline(self) -> bool:
        """This program shuts down: it does not take over, so that the running one goes on. False
        where it has offered that already, and may own everything."""
        self._declined = not self._offered
        return self._declined

    async def _wait_found(self, parts: ProgramParts) -> None:
        """Until discovery has found what the running program has. Raises NotReady where a source of
        it was not heard: then nobody knows whether those workers are gone."""
        with trio.move_on_after(FOUND_SECS):
            while missing_workers(parts.fleet, self.state.workers):
                if not parts.config_store.config.discover:
                    return
                await trio.sleep(POLL_SECS)
        missing, unheard = missing_workers(parts.fleet, self.state.workers), parts.unheard()
        if missing and unheard:
            raise NotReady(
                f"discovery has not found {len(missing)} workers of the running program within "
                f"{FOUND_SECS:g} s, and has heard nothing of {', '.join(unheard)}"
            )

    def _open(self, process_manager: ProcessManager) -> None:
        """Accept. Raises NotReady."""
        try:
            process_manager.open()
        except OSError as error:  # another program has bound an address that is new in the file
            raise NotReady(f"cannot listen: {error.strerror or error}") from None

    def _restore_sessions(self, data_plane: DataPlane) -> None:
        """Of policies that have some, too, and which worker has stored which response."""
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
        """The sessions of several processes, where there are several again."""
        targets = {target.url: target for target in parts.fleet.targets()}
        handed = self.state.shared_sessions, self.state.shared_response_owners
        for table, rows in zip(parts.process_manager.session_tables, handed, strict=False):
            if rows is not None:
                table.restore(rows, targets.get)

    async def _wait_commit(self, parts: ProgramParts) -> None:
        """Wait until this program owns everything. Where that is cancelled, either the running
        program can't commit any more and goes on, or the launcher has the replicas. Raises
        NotReady where that goes on in any case."""
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
            raise NotReady(f"the running program has ended the upgrade, and goes on: {error}")
        self._take_stderr()
        if error:
            _log.error("upgrade_commit_missing reason=%r: the other program has ended", error)

    async def _shut_when_cancelled(self) -> None:
        """A message that has come stays readable, and the other side can send none."""
        try:
            await trio.sleep_forever()
        finally:
            if not self._answered:
                self._shut = True
                self._channel.shut()

    def _receive_commit(self) -> str:
        """Why there was none, or "". Blocks."""
        try:
            message, _ = self._channel.receive()
        except ChannelClosed as error:
            self._given_up = not self._shut and not self._predecessor.has_ended(KILLED_SECS)
            return str(error)
        except UnreadableMessage as error:
            return str(error)
        if not isinstance(message, CommitMessage):
            return f"{type(message).__name__} instead of CommitMessage"
        self._reservations = message.reservations
        return ""

    async def follow_predecessor(self) -> None:
        """Until the last request of the program before has ended."""
        with suppress(ChannelClosed, UnreadableMessage):
            await trio.to_thread.run_sync(self._channel.receive, abandon_on_cancel=True)
        self._channel.close()
        self._predecessor.close()
        _log.info("upgrade_predecessor_ended")
        self._gone.set()

    def close_idle_connections(self) -> None:
        """Have the program before close its idle connections."""
        try:
            self._channel.send(CloseIdleMessage())
        except ChannelClosed:
            return  # it is gone

    async def wait_gone(self) -> None:
        await self._gone.wait()


def take_state(incoming: Incoming, startup: Startup) -> tuple[Startup, Incoming | None]:
    """The startup to go on with. Without a program that could hand over anything it is a start as
    any other. Blocks. Raises NoState."""
    try:
        return incoming.wait_state(startup), incoming
    except PredecessorKilled:
        incoming.go_alone()
        warning = "upgrade_predecessor_killed: it has handed over nothing, so this is a start"
        return replace(startup, warnings=(*startup.warnings, warning)), None


def _with_launch(startup: Startup, state: HandoverState) -> Startup:
    """With the entries whose replicas run: their ports are in use, so others would be chosen."""
    names = LaunchEntry.__struct_fields__
    known = [{key: entry[key] for key in names if key in entry} for entry in state.launch]
    try:
        entries = tuple(msgspec.convert(entry, LaunchEntry) for entry in known)
    except msgspec.ValidationError as error:
        raise NoState(f"the launched replicas of the running program: {error}") from None
    return replace(startup, launch=entries)
