"""A data plane with a worker behind it, real sockets on both sides, and a clock that the test moves."""

import contextlib
import json
import socket
from dataclasses import replace

from omni_proxy.api_keys.caller import LocalRows
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.loop import timeouts
from tests.dataplane.manual_clock import ManualClock
from tests.fleet.entries import entry, fleet_of

QUIET_SECS = 0.02  # nothing comes any more over loopback after that
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n%b"
)


def chat(body=b'{"messages": []}'):
    return CHAT % (len(body), body)


STREAMED = chat(b'{"messages": [], "stream": true}')


class ManualLoop:
    """`clock` is the only clock of the data plane."""

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
        self.ends = []

    def write(self, record):
        self.log.append(json.loads(record))

    def client(self, sent=b""):
        near, far = socket.socketpair()
        near.setblocking(False)
        far.settimeout(5)
        self.ends.append(far)
        Connection(self.dataplane.services, near, "test").start()
        if sent:
            far.sendall(sent)
        self.turn()
        return far

    def worker(self):
        """The end of the connection that the proxy has opened."""
        self.listener.settimeout(5)
        near, _ = self.listener.accept()
        near.settimeout(5)
        self.ends.append(near)
        self.turn()
        return near

    def turn(self):
        """Until nothing happens any more."""
        made = self.dataplane.loop
        while (events := made._epoll.poll(QUIET_SECS)) or made._ready:
            made._run_batch(events)

    def wait(self, secs):
        self.clock.now += secs
        timeouts.expire_tasks(self.dataplane.loop)
        self.turn()

    def tell(self, end, sent):
        end.sendall(sent)
        self.turn()

    @property
    def phases(self):
        return [task.phase for task in self.dataplane.loop.tasks]

    def close(self):
        for end in (*self.ends, self.listener):
            end.close()
        for task in list(self.dataplane.loop.tasks):
            task.close_coroutine()
        for pool in self.dataplane.pools.known.values():
            pool.close()
        self.dataplane.loop.flush()
        self.dataplane.loop._epoll.close()


def received(end):
    """All that has come, and whether that was the end: "open", "closed" or "reset"."""
    came = b""
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while piece := end.recv(1 << 20):
                came += piece
        except ConnectionResetError:
            return came, "reset"
        return came, "closed"
    return came, "open"
