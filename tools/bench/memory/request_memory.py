"""The memory of waiting requests: resident memory per byte, for ordinary and hostile bodies.

The worker is a thread that accepts requests and doesn't answer those with the marker WAITS. The
result is the growth of the proxy's resident memory divided by the number of bytes sent.
"""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

from tools.bench.harness.load_run import LegError, started
from tools.bench.harness.processes import rss_bytes
from tools.bench.harness.proxies import Side

WAITING_SECS = 30.0
WAITS = b'"user":"waits"'
_BODY = b'{"id":"chatcmpl-first"}'  # the same as in the bench's other worker
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_TURN = b'{"role":"user","content":"' + b"What is it that waits here? " * 10 + b'"},'
BODIES = {
    "ordinary chats of 12 kB": (1000, b'{"messages":[' + _TURN * 38 + b"{}]," + WAITS + b"}"),
    "chats of 900 kB": (40, b'{"messages":[' + _TURN * 2950 + b"{}]," + WAITS + b"}"),
    "empty lists, 1 MB": (40, b'{"messages":[' + b"[]," * 333_000 + b"{}]," + WAITS + b"}"),
    "empty objects, 1 MB": (40, b'{"messages":[' + b"{}," * 333_000 + b"{}]," + WAITS + b"}"),
}


class _Silent(socketserver.ThreadingTCPServer):
    """A worker; `waiting` counts the requests that it doesn't answer."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.waiting = 0


class _Handler(socketserver.StreamRequestHandler):
    server: _Silent

    def handle(self) -> None:
        while self.rfile.readline():
            length = 0
            while (line := self.rfile.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            if WAITS in self.rfile.read(length):
                self.server.waiting += 1
            else:
                self.wfile.write(ANSWER)


@contextmanager
def _silent() -> Iterator[_Silent]:
    with _Silent() as server:
        thread = threading.Thread(target=server.serve_forever, name="bench-silent")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _request(body: bytes) -> bytes:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    )
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def bytes_per_byte(side: Side, count: int, body: bytes) -> float:
    """Resident bytes per byte of `count` waiting requests.

    Raises LegError if not all of them reached the worker.
    """
    request = _request(body)
    with _silent() as worker, started(side, [worker.server_address[1]]) as (port, pid):
        if pid is None:
            raise LegError("request memory can only be measured with a proxy")
        before = rss_bytes(pid)
        with ExitStack() as stack:
            for _ in range(count):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(request)
            until, look = monotonic() + WAITING_SECS, threading.Event()
            while worker.waiting < count:
                if monotonic() > until:
                    raise LegError(f"{worker.waiting} of {count} requests reached the worker")
                look.wait(0.05)
            return (rss_bytes(pid) - before) / (count * len(request))


def table(side: Side) -> list[list[str]]:
    rows = [["waiting requests", "count", "bytes each", "resident bytes per byte"]]
    for name, (count, body) in BODIES.items():
        found = bytes_per_byte(side, count, body)
        rows.append([name, str(count), str(len(_request(body))), f"{found:.2f}"])
    return rows
