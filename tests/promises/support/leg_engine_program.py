"""A prefill or decode engine as a separate process, for tests that kill it.

python leg_engine_program.py ROLE CONNECTOR PORT BOOTSTRAP_PORT

The engines connect to each other as the real ones do: a decode engine connects to its prefill
engine at BOOTSTRAP_PORT and continues once it has the KV, or answers with a transfer error if the
connection breaks. A line on stdin names the step of a request ("head", "prefilled", "streaming") at
which the engine writes "held" to stdout and waits; an empty line releases all requests. The reply
to a GET has the number of requests that wait for a decode engine. The program uses only the
standard library, because it is started dozens of times, and one thread for each connection.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from uuid import uuid4

KV_ERROR = b'{"error": {"message": "KVTransferError: the other engine is gone"}}'
DONE = b"data: [DONE]\n\n"


class Engine:
    def __init__(self, role: str, connector: str, port: str, bootstrap_port: str) -> None:
        self.role, self.connector, self.hold = role, connector, ""
        self.port, self.bootstrap_port = int(port), int(bootstrap_port)
        self.engine_id = uuid4().hex
        self.released = threading.Event()
        self.turn = threading.Lock()
        # By room: connections of decode engines, and sockets that wake prefill requests.
        self.joined: dict[str, socket.socket] = {}
        self.waiting: dict[str, tuple[str, socket.socket]] = {}

    def run(self) -> None:
        serve(self.port, self.connection)
        if self.role == "prefill":
            serve(self.bootstrap_port, self.bootstrap)
        say("ready")
        for line in sys.stdin:
            self.hold = line.strip()
            if self.hold:
                self.released.clear()
            else:
                self.released.set()
            say("ready")

    def reach(self, step: str) -> None:
        if step == self.hold:
            say("held")
            self.released.wait()

    def connection(self, sock: socket.socket) -> None:
        file = sock.makefile("rb")
        while request := read_request(file):
            path, body = request
            if not body:  # a probe
                answer(sock, json.dumps({"waiting": len(self.waiting)}).encode())
            elif path == "/abort_request":
                self.abort(json.loads(body)["rid"])
                answer(sock, b"{}")
            else:
                self.reach("head")
                getattr(self, self.role)(sock, json.loads(body))

    def prefill(self, sock: socket.socket, body: dict) -> None:
        if self.connector == "nixl":
            params = {"do_remote_prefill": True, "remote_host": "127.0.0.1",
                      "remote_port": self.bootstrap_port, "remote_engine_id": self.engine_id}  # fmt: skip
            answer(sock, json.dumps({"kv_transfer_params": params}).encode())
            return
        rid = body.get("rid", "")
        room = body.get("bootstrap_room") or body["kv_transfer_params"]["transfer_id"]
        # A closed connection frees a waiting request in vLLM's engines, but not in SGLang's.
        decode = self.wait_for_decode(room, rid, None if rid else sock)
        if decode is None:
            answer(sock, KV_ERROR, "500 Aborted")
            return
        decode.sendall(b"kv\n")
        self.reach("prefilled")
        answer(sock, b'{"choices": []}')

    def wait_for_decode(self, room: str, rid: str, client: socket.socket | None):
        """Returns the decode engine's connection; None after an abort or if the client left."""
        woken, wakes = socket.socketpair()
        with self.turn:
            if str(room) in self.joined:
                return self.joined.pop(str(room))
            self.waiting[str(room)] = (rid, wakes)
        select.select([woken, *([client] if client else [])], [], [])
        with self.turn:
            self.waiting.pop(str(room), None)
            return self.joined.pop(str(room), None)

    def abort(self, prefix: str) -> None:
        with self.turn:
            for rid, wakes in self.waiting.values():
                if rid.startswith(prefix):
                    wakes.send(b"a")

    def bootstrap(self, sock: socket.socket) -> None:
        file = sock.makefile("rb")
        line = file.readline()
        if line.startswith(b"GET /query"):
            answer(sock, json.dumps({"0": {"engine_id": self.engine_id}}).encode())
            return
        _, engine_id, room = line.decode().split()
        if engine_id not in ("any", self.engine_id):
            return  # the request names an engine that ran here earlier
        if self.connector == "nixl":
            self.reach("prefilled")
            sock.sendall(b"kv\n")
            return
        with self.turn:
            self.joined[room] = sock
            if room in self.waiting:
                self.waiting[room][1].send(b"j")
        file.readline()  # until the decode engine disconnects

    def decode(self, sock: socket.socket, body: dict) -> None:
        if not self.has_kv(body):
            answer(sock, KV_ERROR, "500 Transfer")
            return
        self.reach("prefilled")
        name = f"{self.port}"
        if not body.get("stream"):
            text = json.dumps({"by": name, "text": "012"}).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n".encode()
            sock.sendall(head + text[:-3])
            self.reach("streaming")
            sock.sendall(text[-3:])
            return
        events = [json.dumps({"by": name, "text": f"{n}"}).encode() for n in range(3)]
        lines = [chunk(b"data: %b\n\n" % event) for event in events]
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                     b"transfer-encoding: chunked\r\n\r\n" + lines[0])  # fmt: skip
        self.reach("streaming")
        sock.sendall(b"".join((*lines[1:], chunk(DONE), chunk(b""))))

    def has_kv(self, body: dict) -> bool:
        """Fetches the KV from the prefill engine; True also if there is none to fetch."""
        params = body.get("kv_transfer_params")
        if self.connector == "sglang":
            address, wanted = (body["bootstrap_host"], body["bootstrap_port"]), "any"
            room = body["bootstrap_room"]
        elif params is None:
            return True
        elif self.connector == "nixl":
            address, room = (params["remote_host"], params["remote_port"]), "-"
            wanted = params["remote_engine_id"]
        else:
            host, _, port = params["remote_bootstrap_addr"].removeprefix("http://").rpartition(":")
            address, room = (host, int(port)), params["transfer_id"]
            wanted = params["remote_engine_id"]
        try:
            with socket.create_connection(address) as prefill:
                prefill.sendall(f"JOIN {wanted} {room}\n".encode())
                return prefill.recv(3) == b"kv\n"
        except OSError:
            return False


def serve(port: int, run) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=256)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=connection, args=(sock,), daemon=True).start()

    def connection(sock: socket.socket) -> None:
        with sock:
            try:
                run(sock)
            except OSError:
                return  # the peer left

    threading.Thread(target=accept, daemon=True).start()


def read_request(file) -> tuple[str, bytes] | None:
    line, length = file.readline(), 0
    while (field := file.readline()) not in (b"\r\n", b""):
        name, _, value = field.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    body = file.read(length)
    if not line.endswith(b"\r\n") or len(body) < length:
        return None
    return line.split()[1].decode(), body


def answer(sock: socket.socket, body: bytes, status: str = "200 OK") -> None:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + body)


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


if __name__ == "__main__":
    Engine(*sys.argv[1:]).run()
