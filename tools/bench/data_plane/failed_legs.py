"""The time until a client gets the error of a failed leg, and until the other engine is free.

The rows are faults that users of other routers have reported. As in SGLang, the engines wait for
each other in a bootstrap room, and a waiting request stays there until it is aborted by its `rid`,
even if its connection is closed. Retries are off, so that errors are timed. All programs listen
only on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.harness import report
from tools.bench.harness.load_run import LegError
from tools.bench.harness.peers import VERSIONS, borrowed
from tools.bench.harness.processes import running
from tools.bench.harness.proxies import (
    OMNI_FILE,
    ROUTER_WORDS,
    Place,
    Side,
    free_port,
    omni_command,
)

CAP_SECS = 3.0  # the longest wait
LATE_SECS = 1.0  # until the end of a prefill engine's body
READY_SECS = 60.0
ROUTER = "sglang-router"
CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
STREAMED = CHAT[:-1] + b', "stream": true}'
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST
CONFIG = """\
[server]
host = "127.0.0.1"
port = {port}
state_file = "off"
access_log = "off"
log_level = "error"
[routing]
max_total_retries = 1
[health]
interval_secs = 600
success_threshold = 1
[[workers]]
url = "http://127.0.0.1:{prefill}"
role = "prefill"
[[workers]]
url = "http://127.0.0.1:{decode}"
role = "decode"
"""


class Rooms:
    """Bootstrap rooms of both legs. `held` are the events that wake an engine's queued requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sides: dict[tuple[object, str], threading.Event] = {}
        self.held: dict[tuple[str, str], threading.Event] = {}

    def side(self, room: object, name: str) -> threading.Event:
        with self._lock:
            return self._sides.setdefault((room, name), threading.Event())

    def wait(self, key: tuple[str, str], event: threading.Event) -> bool:
        """Wait in the queue; False if the request was aborted there."""
        aborted = self.held[key] = threading.Event()
        give_up_at = time.monotonic() + 2 * CAP_SECS
        try:
            while not aborted.is_set() and time.monotonic() < give_up_at:
                if event.wait(0.001):
                    return True
            return False
        finally:
            self.held.pop(key, None)

    def abort(self, role: str, rid: str) -> None:
        for (of, name), event in list(self.held.items()):
            if of == role and name.startswith(rid):
                event.set()


class Engine(ThreadingHTTPServer):
    """An engine; `fault` is how it fails a request that the other engine has received, too."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, role: str, rooms: Rooms, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.role, self.rooms = role, rooms
        self.other: Engine | None = None
        self.fault = ""
        self.begun = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a router that has disconnected."""

    def close_connections(self) -> None:
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Stop listening: the port refuses connections from now on."""
        self.shutdown()
        self.server_close()
        self.close_connections()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent separately
    server: Engine

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/abort_request":
            self.server.rooms.abort(self.server.role, body["rid"])
            self._answer(b"{}")
            return
        self.server.begun.set()
        room = body["bootstrap_room"]
        rid = body.get("rid") or str(room)
        if self.server.fault and self._fail(self.server.fault, room, rid):
            return
        if not self._await_room(room, rid):
            self._answer(b'{"error": "aborted"}', 500)
        elif body.get("stream"):
            self._answer(b'data: {"text": "a"}\n\ndata: [DONE]\n\n', kind="text/event-stream")
        else:
            reply = {"id": "a", "object": "x", "created": 1, "model": "m", "choices": []}
            self._answer(json.dumps(reply).encode())

    def _await_room(self, room: object, rid: str) -> bool:
        engine, rooms = self.server, self.server.rooms
        rooms.side(room, engine.role).set()
        if engine.role == "decode":
            return rooms.wait(("decode", rid), rooms.side(room, "kv"))
        met = rooms.wait(("prefill", rid), rooms.side(room, "decode"))
        if met:
            rooms.side(room, "kv").set()
        return met

    def _fail(self, fault: str, room: object, rid: str) -> bool:
        other = self.server.other
        assert other is not None
        other.begun.wait(CAP_SECS)
        if fault == "late end":
            self.server.rooms.side(room, "kv").set()
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{")
            self.wfile.flush()
            threading.Event().wait(LATE_SECS)
            self.wfile.write(b"}")
        elif fault == "500":
            self._answer(b'{"error": "no"}', 500)
        elif fault == "silent":
            self.server.rooms.wait((self.server.role, rid), threading.Event())
            self.close_connection = True
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.close_connection = True
            os.close(self.connection.detach())
        else:
            return False
        return True

    def _answer(self, body: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@dataclass(slots=True)
class Fleet:
    port: int  # of the router
    rooms: Rooms
    prefill: Engine
    decode: Engine


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of one row.

    `secs` is the time until the client's error or byte, `freed_secs` that from then on until no
    engine has the request. CAP_SECS means not within that time, None not measured.
    """

    secs: float | None
    freed_secs: float | None = None


Row = Callable[[Fleet], Seen]


def failing(role: str, fault: str) -> Row:
    def measured(fleet: Fleet) -> Seen:
        with faulty(fleet.prefill if role == "prefill" else fleet.decode, fault):
            return Seen(_error_secs(fleet), _freed_secs(fleet))

    return measured


def unreachable(fleet: Fleet) -> Seen:
    """Close the decode engine's port; it is opened again afterwards."""
    port = fleet.decode.port
    fleet.decode.leave()
    try:
        return Seen(_error_secs(fleet), _freed_secs(fleet))
    finally:
        fleet.decode = Engine("decode", fleet.rooms, port)
        fleet.decode.other, fleet.prefill.other = fleet.prefill, fleet.decode


def leaving(fleet: Fleet) -> Seen:
    """The client disconnects while both legs wait."""
    with faulty(fleet.prefill, "silent"):
        with socket.create_connection(("127.0.0.1", fleet.port)) as client:
            client.sendall(_request(CHAT))
            _wait(lambda: len(fleet.rooms.held) == 2)
        return Seen(None, _freed_secs(fleet))


def first_token(fleet: Fleet) -> Seen:
    """Prefill's body ends LATE_SECS later."""
    with faulty(fleet.prefill, "late end"):
        _, secs = _answer_secs(fleet, STREAMED)
        threading.Event().wait(2 * LATE_SECS)  # until that leg has ended
        return Seen(secs)


def stale(fleet: Fleet) -> Seen:
    """The engines have closed the connections that the router keeps."""
    fleet.prefill.close_connections()
    fleet.decode.close_connections()
    status, secs = _answer_secs(fleet, CHAT)
    return Seen(secs if status == 200 else CAP_SECS)


ROWS: dict[str, Row] = {
    "prefill answers 500, decode waits": failing("prefill", "500"),
    "prefill breaks, decode waits": failing("prefill", "reset"),
    "decode answers 500, prefill waits": failing("decode", "500"),
    "decode breaks, prefill waits": failing("decode", "reset"),
    "decode can't be reached": unreachable,
    "the client leaves, both legs wait": leaving,
    f"first byte, prefill's body ends {LATE_SECS:g} s later": first_token,
    "engines have closed idle connections": stale,
}


@contextmanager
def faulty(engine: Engine, fault: str) -> Iterator[None]:
    engine.fault = fault
    try:
        yield
    finally:
        engine.fault = ""


def _request(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def _answer_secs(fleet: Fleet, body: bytes) -> tuple[int, float]:
    """The answer's status, 0 for none, and the time until its first byte."""
    for engine in (fleet.prefill, fleet.decode):
        engine.begun.clear()
    with socket.create_connection(("127.0.0.1", fleet.port), CAP_SECS) as client:
        began_at = time.monotonic()
        client.sendall(_request(body))
        try:
            line = client.makefile("rb").readline()
        except OSError:
            return 0, CAP_SECS
        return int(line.split()[1] if line else 0), time.monotonic() - began_at


def _error_secs(fleet: Fleet) -> float:
    status, secs = _answer_secs(fleet, CHAT)
    if status == 200:
        raise LegError("a leg failed, but the client got an answer")
    return secs


def _freed_secs(fleet: Fleet) -> float:
    began_at = time.monotonic()
    _wait(lambda: not fleet.rooms.held)
    secs = min(time.monotonic() - began_at, CAP_SECS)
    for role in ("prefill", "decode"):
        fleet.rooms.abort(role, "")
    return secs


def _wait(holds: Callable[[], bool]) -> None:
    """Wait for `holds()`, at most CAP_SECS."""
    give_up_at = time.monotonic() + CAP_SECS
    while not holds() and time.monotonic() < give_up_at:
        threading.Event().wait(0.0005)


def ours(place: Place) -> list[str]:
    config = place.folder / OMNI_FILE
    prefill, decode = place.workers
    config.write_text(CONFIG.format(port=place.port, prefill=prefill, decode=decode))
    return shlex.split(omni_command().format(config=config))


def sglang_router(place: Place) -> list[str]:
    """Raises NotInstalled."""
    prefill, decode = (f"http://127.0.0.1:{port}" for port in place.workers)
    return [
        *(str(borrowed(ROUTER)), "launch", "--host", "127.0.0.1", "--port", str(place.port)),
        *("--pd-disaggregation", "--prefill", prefill, "8998", "--decode", decode),
        *("--disable-retries", "--disable-circuit-breaker", *ROUTER_WORDS),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
    ]


@contextmanager
def _running(side: Side) -> Iterator[Fleet]:
    rooms = Rooms()
    prefill, decode = Engine("prefill", rooms), Engine("decode", rooms)
    prefill.other, decode.other = decode, prefill
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder, ExitStack() as stack:
        place = Place(free_port(), (prefill.port, decode.port), Path(folder))
        assert side.command is not None
        log = stack.enter_context((place.folder / "log").open("w"))
        process = stack.enter_context(running(side.command(place), log))
        fleet = Fleet(place.port, rooms, prefill, decode)
        give_up_at = time.monotonic() + READY_SECS
        while not _serves(fleet):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise LegError(f"{side.name} gave no answer: {Path(log.name).read_text()[-400:]}")
            threading.Event().wait(0.1)
        yield fleet
        for engine in (fleet.prefill, fleet.decode):
            engine.leave()


def _serves(fleet: Fleet) -> bool:
    try:
        return _answer_secs(fleet, CHAT)[0] == 200
    except OSError:
        return False


def measure(side: Side, rounds: int) -> dict[str, list[Seen]]:
    """Raises LegError, NotInstalled."""
    found: dict[str, list[Seen]] = {}
    with _running(side) as fleet:
        for name, row in ROWS.items():
            print(f"  {name} with {side.name}", file=sys.stderr)
            for _ in range(rounds):
                found.setdefault(name, []).append(row(fleet))
                # A successful request between two failures, so that no worker is ejected.
                if not _serves(fleet):
                    raise LegError(f"{side.name} stopped serving after: {name}")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run with the arguments of the bench's command line."""
    sides = [Side("omni-proxy", ours)]
    if ROUTER in arguments.peer:
        sides.append(Side(f"{ROUTER} {VERSIONS[ROUTER]}", sglang_router))
    found = {side.name: measure(side, arguments.rounds) for side in sides}
    rows = [["", *(f"{side}: {what}" for side in found for what in ("client", "engines free"))]]
    for name in ROWS:
        seen = [found[side][name] for side in found]
        cells = [cell([getattr(one, what) for one in each])
                 for each in seen for what in ("secs", "freed_secs")]  # fmt: skip
        rows.append([name, *cells])
    print(f"medians of {arguments.rounds} (longest), ms; engines free: from then on\n")
    print("\n".join(report.columns(rows)))
    return 0


def cell(secs: Sequence[float | None]) -> str:
    known = [each for each in secs if each is not None]
    if not known:
        return ""
    if median(known) >= CAP_SECS:
        return f"> {CAP_SECS:g} s"
    longest = max(known)
    most = f"> {CAP_SECS:g} s" if longest >= CAP_SECS else f"{1000 * longest:.0f}"
    return f"{1000 * median(known):.1f} ({most})"
