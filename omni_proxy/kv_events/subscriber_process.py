"""The subscriber process: receives and decodes the KV events of all engines, for the main process.

It is a separate process, because decoding would delay the main process's event loop. Each
`Subscription` is one publisher's sockets, with the state that validates batches
(note:real-engines 4: frames, replay, which side binds). Invariants: batches of two connections are
never mixed: when a connection breaks, the socket is replaced, and its queued batches are dropped.
The process exits when its socket to the main process closes. If the main process reads slowly, this
one blocks, and batches queue in ZeroMQ up to a limit; beyond that they are lost, which is detected
as a gap. It ignores signals, which the main process handles.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Final, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from omni_proxy.kv_events.messages import (
    ChangesEvent,
    FlushedCommand,
    LimitCommand,
    PublisherReport,
    RepeatCommand,
    SubscribeCommand,
    SubscriberCommand,
    UnsubscribeCommand,
)
from omni_proxy.multiprocess.ipc.channel import MessageFrames, encode_frame
from omni_proxy.routing.kv_events.engine_blocks import MAX_PACKED, HeldChange, pack_changes
from omni_proxy.routing.kv_events.publisher_state import PublisherState

MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
WAITING_BATCHES: Final = 20_000  # queue limit; more batches are lost, which is detected as a gap
REPLAY_BATCHES: Final = 200_000
READ_AT_ONCE: Final = 256  # batches read from one socket before the next
RECONNECT_MS: Final = 100
MAX_RECONNECT_MS: Final = 2000
HEARTBEAT_MS: Final = 5000
HEARTBEAT_TIMEOUT_MS: Final = 15_000
# Time after the handshake until the publisher has certainly processed our subscription.
SUBSCRIBED_AFTER_SECS: Final = 0.2
REOPEN_SECS: Final = 0.5
REPLAY_TIMEOUT_SECS: Final = 5.0  # a replay fails after this time without a batch
REPLAY_END: Final = b"\xff" * 8
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Poller(Protocol):
    def register(self, socket: zmq.Socket[bytes], flags: int) -> None: ...
    def unregister(self, socket: zmq.Socket[bytes]) -> None: ...


class Subscription:
    """A subscription. `now`: monotonic seconds."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], poller: Poller, *, endpoint: str,
        binds: bool, replay: str,
    ) -> None:  # fmt: skip
        self.state = PublisherState(replays=bool(replay))
        self.generation = 0
        self._context = context
        self._poller = poller
        self._endpoint = endpoint
        self._binds = binds
        self._replay_endpoint = replay
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_until = 0.0
        self._error = ""
        self._is_connected = False
        self._subscribed_at: float | None = None
        self._reopen_at: float | None = None
        self._reported: tuple[object, ...] = ()

    def open(self, now: float) -> None:
        """Connect or bind; if that fails, `tick` retries it."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, WAITING_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = socket
        try:
            self._attach(socket)
        except zmq.ZMQError as error:
            self._error = f"{self._endpoint}: {error.strerror or error}"
            self._close_socket()
            self._reopen_at = now + REOPEN_SECS
            return
        self._error, self._reopen_at = "", None
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _attach(self, socket: zmq.Socket[bytes]) -> None:
        if not self._binds:
            socket.connect(self._endpoint)
            return
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            # The address is not of this machine: the publisher listens there.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV) or "*" in self._endpoint:
                raise
            socket.connect(self._endpoint)

    def close(self) -> None:
        self._close_socket()
        self._close_replay()

    def read(self, now: float) -> bool:
        """Process received batches. Returns whether there may be more."""
        self._read_replay(now)
        for _ in range(READ_AT_ONCE):
            if self._socket is None:
                return False
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._take_monitor_events(now)
                return False
            # If a break is reported by now, this batch may be from the old connection.
            if self._take_monitor_events(now):
                return True
            if len(frames) >= 2 and len(frames[-2]) == len(REPLAY_END):
                number = int.from_bytes(frames[-2], "big")
                self.state.receive(number, frames[-1], now)
                self._ask(now)
        return True

    def tick(self, now: float) -> None:
        """Process timeouts; call it several times a second, after `read`."""
        if self._reopen_at is not None and now >= self._reopen_at:
            self.open(now)
        if self._subscribed_at is not None and now >= self._subscribed_at:
            self._subscribed_at = None
            self.state.connected(now)
        if self._replay is not None and now >= self._replay_until:
            self._close_replay()
            self.state.replay_failed(f"{self._replay_endpoint} does not answer", now)
        self.state.tick(now)
        self._ask(now)

    def flushed(self, generation: int, now: float) -> list[HeldChange]:
        """Like `PublisherState.flushed`; returns all blocks that are known after it."""
        self.generation = generation
        self.state.flushed(now)
        self._ask(now)
        return [*self.state.take_changes(), *self.state.dump()]

    def report(self, number: int) -> PublisherReport | None:
        """The next report; None if nothing has changed."""
        state = self.state
        reason = state.reason
        if self._error:
            reason = self._error
        elif not self._is_connected and state.mode == "inferred":
            reason = f"no connection to a publisher at {self._endpoint}"
        facts = (state.mode, reason, state.batches, state.undecodable)
        if facts == self._reported:
            return None
        self._reported = facts
        return PublisherReport(number, *facts, state.undecodable_reason)

    def _take_monitor_events(self, now: float) -> bool:
        """Process connection events. Returns whether the connection broke."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return False
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
                self._subscribed_at = now + SUBSCRIBED_AFTER_SECS
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._is_connected = False
                self._subscribed_at = None
                self._close_socket()
                self.state.disconnected()
                self._ask(now)
                self.open(now)
                return True
        return False

    def _ask(self, now: float) -> None:
        """Request the replay that the state needs, and close one that it no longer awaits."""
        if self._replay is not None and not self.state.is_replaying:
            self._close_replay()
        start, self.state.replay_from = self.state.replay_from, None
        if start is None:
            return
        self._close_replay()
        socket = self._context.socket(zmq.DEALER)
        self._replay = socket
        self._replay_until = now + REPLAY_TIMEOUT_SECS
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, REPLAY_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            reason = f"{self._replay_endpoint}: {error.strerror or error}"
            self._close_replay()
            self.state.replay_failed(reason, now)
            return
        self._poller.register(socket, zmq.POLLIN)

    def _read_replay(self, now: float) -> None:
        for _ in range(READ_AT_ONCE):
            if self._replay is None:
                return
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._replay_until = now + REPLAY_TIMEOUT_SECS
            # The frames before these two differ by engine: an empty frame, the topic.
            if len(frames) < 2 or len(frames[-2]) != len(REPLAY_END):
                self._close_replay()
                self.state.replay_failed(f"{self._replay_endpoint}: not a replay", now)
            elif frames[-2] == REPLAY_END:
                self._close_replay()
                self.state.replay_ended(now)
            else:
                self.state.replayed(int.from_bytes(frames[-2], "big"), frames[-1], now)
            self._ask(now)

    def _close_socket(self) -> None:
        if self._socket is None:
            return
        for zmq_socket in (self._socket, self._monitor):
            if zmq_socket is not None:
                self._forget(zmq_socket)
        self._socket.disable_monitor()
        self._socket.close(0)
        self._socket = self._monitor = None

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._forget(self._replay)
            self._replay.close(0)
            self._replay = None

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        try:
            self._poller.unregister(socket)
        except KeyError:
            return  # it was never registered


TICK_MS: Final = 100
REPORT_SECS: Final = 0.5  # interval of reports of which only counts have changed
READ_BYTES: Final = 1 << 16
# Bytes of changes in one message: bounds the turns of event loops that apply them.
MESSAGE_BYTES: Final = 8 * MAX_PACKED
CHANGES_PER_MESSAGE: Final = 64
# If there are too many blocks, 1/DROPPED_SHARE of the largest publisher's are dropped together.
DROPPED_SHARE: Final = 16


def main(argv: Sequence[str]) -> int:
    """Run until the main process ends. `argv`: the number of the socket's descriptor."""
    if len(argv) != 1 or not argv[0].isdecimal():
        sys.exit("kv-events-process is internal: omni-proxy starts it if workers have kv_events")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(argv[0])) as channel:
        SubscriberProcess(channel).run()
    return 0


class SubscriberProcess:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = MessageFrames()
        self._decoder = msgspec.msgpack.Decoder(SubscriberCommand)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self._subscriptions: dict[int, Subscription] = {}
        self._max_blocks = sys.maxsize
        self._modes: dict[int, str] = {}
        self._report_at = 0.0

    def run(self) -> None:
        """Run until the main process closes the socket."""
        more = False
        try:
            while True:
                ready = dict(self._poller.poll(0 if more else TICK_MS))
                if ready.get(self._channel.fileno()) and not self._read_commands():
                    return
                more = False
                for subscription in self._subscriptions.values():
                    now = monotonic()
                    more |= subscription.read(now)
                    subscription.tick(now)
                self._drop_oldest()
                self._send_all()
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            for subscription in self._subscriptions.values():
                subscription.close()
            self._context.destroy(0)

    def _read_commands(self) -> bool:
        """Execute received commands. Returns False if the main process has closed the socket."""
        received = self._channel.recv(READ_BYTES)
        for body in self._frames.feed(received):
            self._take(self._decoder.decode(body))
        return bool(received)

    def _take(self, command: SubscriberCommand) -> None:
        match command:
            case SubscribeCommand(number, endpoint, binds, replay):
                subscription = Subscription(
                    self._context, self._poller, endpoint=endpoint, binds=binds, replay=replay
                )
                self._subscriptions[number] = subscription
                subscription.open(monotonic())
            case UnsubscribeCommand(number):
                self._subscriptions.pop(number).close()
                self._modes.pop(number, None)
            case FlushedCommand(number, generation):
                subscription = self._subscriptions[number]
                self._send_changes(number, subscription.flushed(generation, monotonic()))
            case LimitCommand(blocks):
                self._max_blocks = blocks
            case RepeatCommand():
                for number, subscription in self._subscriptions.items():
                    self._send_changes(number, subscription.state.take_changes())
                    self._send_changes(number, subscription.state.dump())

    def _drop_oldest(self) -> None:
        """If there are too many blocks, drop those that were stored first."""
        states = [subscription.state for subscription in self._subscriptions.values()]
        total = sum(len(state.blocks) for state in states)
        while total > self._max_blocks:
            largest = max(states, key=lambda state: len(state.blocks))
            block_count = len(largest.blocks)
            count = min(block_count, max(total - self._max_blocks, block_count // DROPPED_SHARE))
            largest.drop_oldest(count)
            total -= count

    def _send_all(self) -> None:
        now = monotonic()
        due = now >= self._report_at
        if due:
            self._report_at = now + REPORT_SECS
        for number, subscription in self._subscriptions.items():
            self._send_changes(number, subscription.state.take_changes())
            mode = subscription.state.mode
            if due or self._modes.get(number) != mode:
                self._modes[number] = mode
                report = subscription.report(number)
                if report is not None:
                    self._send(report)

    def _send_changes(self, number: int, changes: Sequence[HeldChange]) -> None:
        generation = self._subscriptions[number].generation
        message: list[tuple[int, bytes]] = []
        room = MESSAGE_BYTES
        for packed in pack_changes(changes):
            room -= max(len(packed[1]), MESSAGE_BYTES // CHANGES_PER_MESSAGE)
            if message and room < 0:
                self._send(ChangesEvent(number, generation, message))
                message, room = [], MESSAGE_BYTES
            message.append(packed)
        if message:
            self._send(ChangesEvent(number, generation, message))

    def _send(self, message: ChangesEvent | PublisherReport) -> None:
        self._channel.sendall(encode_frame(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
