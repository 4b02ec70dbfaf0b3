"""The subscriber process: receives and decodes the KV events of all engines, for the main process.

It is a separate process, because decoding would delay the main process's event loop. Invariant: it
does not outlive the main process: it exits when their socket closes. If the main process reads
slowly, this one blocks, and batches queue in ZeroMQ up to a limit; beyond that they are lost, which
is detected as a gap. It ignores signals, which the main process handles.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Final

import msgspec
import zmq

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
from omni_proxy.kv_events.subscription import Subscription
from omni_proxy.multiprocess.ipc import MessageFrames, encode_frame
from omni_proxy.routing.kv_events.held_changes import MAX_PACKED, HeldChange, pack_changes

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
            held = len(largest.blocks)
            count = min(held, max(total - self._max_blocks, held // DROPPED_SHARE))
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
