"""A data plane with one worker, real sockets on both sides, and a clock that the test moves."""

import contextlib
import json
import socket
from dataclasses import replace

from omni_proxy.api_keys.caller_limits import LocalRows
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.loop import timers
from tests.dataplane.manual_clock import ManualClock
from tests.fleet.entries import entry, fleet_of

QUIET_SECS = 0.02  # bytes sent over loopback have arrived by then
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n%b"
)


def chat(body=b'{"messages": []}'):
    return CHAT % (len(body), body)


STREAMED = chat(b'{"messages": [], "stream": true}')


class ManualLoop:
    """The test runs the event loop and moves `clock`, the only clock of the data plane."""

    def __init__(self, config=""):
        self.clock = ManualClock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        host, port = self.listener.getsockname()
        self.fleet = fleet_of(replace(entry("a"), url=f"http://{host}:{port}"))
        config = parse(config)
        self.dataplane = DataPlane(
            self.fleet,
            config,
            admin_socket="/nowhere",
            sources=Sources(lambda bound: 0, self.clock),
        )
        slots = {key.name: slot for slot, key in enumerate(config.keys, start=1)}
        self.dataplane.follow_keys(KeyTable(config.keys), slots, LocalRows())
        self.dataplane.recorders.access_log, self.dataplane.settings.access_log_is_json = self, True
        self.log = []
        self.sockets = []

    def write(self, record):
        self.log.append(json.loads(record))

    def client(self, sent=b""):
        """Connect a client that sends `sent`; returns its socket."""
        near, client = socket.socketpair()
        near.setblocking(False)
        client.settimeout(5)
        self.sockets.append(client)
        Connection(self.dataplane.services, near, "test").start()
        if sent:
            client.sendall(sent)
        self.run_until_idle()
        return client

    def worker(self):
        """Accept the proxy's next connection; returns the worker's socket."""
        self.listener.settimeout(5)
        sock, _ = self.listener.accept()
        sock.settimeout(5)
        self.sockets.append(sock)
        self.run_until_idle()
        return sock

    def run_until_idle(self):
        loop = self.dataplane.loop
        while (events := loop._epoll.poll(QUIET_SECS)) or loop._ready:
            loop._run_batch(events)

    def wait(self, secs):
        self.clock.now += secs
        timers.expire_tasks(self.dataplane.loop)
        self.run_until_idle()

    def send_from(self, sock, data):
        sock.sendall(data)
        self.run_until_idle()

    @property
    def phases(self):
        return [task.phase for task in self.dataplane.loop.tasks]

    def close(self):
        for sock in (*self.sockets, self.listener):
            sock.close()
        for task in list(self.dataplane.loop.tasks):
            task.close_coroutine()
        for pool in self.dataplane.upstream_pools.known.values():
            pool.close()
        self.dataplane.loop.flush()
        self.dataplane.loop._epoll.close()


def read_available(sock):
    """All bytes that have arrived, and the state: "open", "closed" or "reset"."""
    received = b""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while piece := sock.recv(1 << 20):
                received += piece
        except ConnectionResetError:
            return received, "reset"
        return received, "closed"
    return received, "open"
