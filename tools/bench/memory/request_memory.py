"""What waiting requests hold: resident memory by their bytes, of ordinary and of hostile bodies.

The worker is a thread of ours that takes requests and does not answer those that ask to wait. The
figure is the growth of the proxy's resident memory by all bytes that were sent.
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
_BODY = b'{"id":"chatcmpl-first"}'  # as the bench's other worker tells it
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_TALK = b'{"role":"user","content":"' + b"What is it that waits here? " * 10 + b'"},'
BODIES = {
    "ordinary chats of 12 kB": (1000, b'{"messages":[' + _TALK * 38 + b"{}]," + WAITS + b"}"),
    "chats of 900 kB": (40, b'{"messages":[' + _TALK * 2950 + b"{}]," + WAITS + b"}"),
    "empty lists, 1 MB": (40, b'{"messages":[' + b"[]," * 333_000 + b"{}]," + WAITS + b"}"),
    "empty objects, 1 MB": (40, b'{"messages":[' + b"{}," * 333_000 + b"{}]," + WAITS + b"}"),
}


class _Silent(socketserver.ThreadingTCPServer):
    """`waiting` counts the requests that it leaves without an answer."""

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
    """Raises LegError where not all of them came to wait at the worker."""
    request = _request(body)
    with _silent() as worker, started(side, [worker.server_address[1]]) as (port, pid):
        if pid is None:
            raise LegError("to hold requests takes a proxy")
        before = rss_bytes(pid)
        with ExitStack() as stack:
            for _ in range(count):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(request)
            until, look = monotonic() + WAITING_SECS, threading.Event()
            while worker.waiting < count:
                if monotonic() > until:
                    raise LegError(f"{worker.waiting} of {count} requests came to the worker")
                look.wait(0.05)
            return (rss_bytes(pid) - before) / (count * len(request))


def table(side: Side) -> list[list[str]]:
    rows = [["waiting requests", "count", "bytes each", "resident bytes per byte"]]
    for name, (count, body) in BODIES.items():
        found = bytes_per_byte(side, count, body)
        rows.append([name, str(count), str(len(_request(body))), f"{found:.2f}"])
    return rows
