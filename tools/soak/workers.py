"""The soak's workers, each in its own process, which can be killed.

`honest` answers chats, streamed or not, and accepts weight updates. Each other kind does one thing
that a broken or hostile worker may do; these serve the model `hostile`, so that the proxy never
sends them an honest request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from tools.soak.wire import Broken, Message, Reader, chunk, counted

EVENTS: Final = 12  # of a streamed answer
EVENT_SECS: Final = 0.03  # between two events
ANSWER_SECS: Final = 0.02  # until an answer that is not streamed
LARGE_LIST: Final = 300_000  # entries of an oversized list
SSE_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
Answer = Callable[["Worker", trio.SocketStream, Message], Awaitable[bool]]


class Worker:
    """One worker; `kind` determines how model requests and list routes are answered."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.version = "v0"
        self.running = trio.Event()
        self.running.set()

    async def serve(
        self, port: int, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; reports its port when it accepts connections."""
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1", backlog=1024)
        task_status.started(listener.socket.getsockname()[1])
        await trio.serve_listeners(self._connection, [listener])

    async def _connection(self, stream: trio.SocketStream) -> None:
        reader = Reader(stream)
        try:
            while (request := await reader.message(answer=False)) is not None:
                if not await self._answer(stream, request):
                    return
        except (Broken, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _answer(self, stream: trio.SocketStream, request: Message) -> bool:
        """Answer a request; return whether the connection stays open."""
        path = request.line.split(" ")[1].partition("?")[0]
        if path == "/health":
            await stream.send_all(counted(b'{"status": "ok"}'))
            return True
        if self.kind != "honest":
            return await HOSTILE[self.kind](self, stream, request)
        control = CONTROL.get(path)
        if control is not None:
            await stream.send_all(counted(json.dumps(control(self, request)).encode()))
        elif path in ("/v1/chat/completions", "/v1/completions"):
            await self._generate(stream, json.loads(request.body))
        else:
            await stream.send_all(counted(b'{"detail": "Not Found"}', "404 Not Found"))
        return True

    async def _generate(self, stream: trio.SocketStream, body: dict[str, object]) -> None:
        await self.running.wait()
        answer = {"worker": self.name, "version": self.version, "nonce": body.get("nonce")}
        if not body.get("stream"):
            await trio.sleep(ANSWER_SECS)
            await stream.send_all(counted(json.dumps(answer).encode()))
            return
        event = b"data: %b\n\n" % json.dumps(answer).encode()
        await stream.send_all(SSE_HEAD + chunk(event))
        for _ in range(EVENTS - 1):
            await trio.sleep(EVENT_SECS)
            await stream.send_all(chunk(event))
        await stream.send_all(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _updated(worker: Worker, request: Message) -> object:
    fields = json.loads(request.body or b"{}")
    worker.version = str(fields.get("weight_version") or fields.get("new_version"))
    return {"success": True, "message": "ok"}


def _paused(worker: Worker, _: Message) -> object:
    worker.running = trio.Event()
    return {"success": True, "message": "paused"}


def _continued(worker: Worker, _: Message) -> object:
    worker.running.set()
    return {"success": True, "message": "continued"}


CONTROL: Final[dict[str, Callable[[Worker, Message], object]]] = {
    "/model_info": lambda worker, _: {"weight_version": worker.version, "model_path": "m"},
    "/server_info": lambda worker, _: {"tp_size": 1, "weight_version": worker.version},
    "/v1/models": lambda worker, _: {"object": "list", "data": [{"id": "honest"}]},
    "/v1/loads": lambda worker, _: {"loads": [{"dp_rank": 0, "num_running_reqs": 0}]},
    "/flush_cache": lambda worker, _: {"success": True},
    "/update_weights_from_disk": _updated,
    "/update_weight_version": _updated,
    "/pause_generation": _paused,
    "/continue_generation": _continued,
}


async def _floods_interim(_: Worker, stream: trio.SocketStream, __: Message) -> bool:
    with trio.move_on_after(5):
        while True:
            await stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n" * 500)
    return False


async def _garbage(_: Worker, stream: trio.SocketStream, __: Message) -> bool:
    await stream.send_all(SSE_HEAD + chunk(b"data: 1\n\n"))
    await trio.sleep(0.05)
    await stream.send_all(b"zz\r\nno chunk\r\n")
    return False


async def _tiny_chunks(_: Worker, stream: trio.SocketStream, __: Message) -> bool:
    await stream.send_all(SSE_HEAD)
    with trio.move_on_after(3):
        while True:
            await stream.send_all(chunk(b"x") * 2000)
    return False


async def _hangs(_: Worker, stream: trio.SocketStream, __: Message) -> bool:
    with trio.move_on_after(20):
        await stream.receive_some(1)
    return False


async def _hangs_up(_: Worker, stream: trio.SocketStream, __: Message) -> bool:
    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/pl")
    return False


async def _spoofs(_: Worker, stream: trio.SocketStream, __: Message) -> bool:
    more = "x-sglang-omni-worker: spoofed\r\nx-omni-attempts: 99\r\n"
    await stream.send_all(counted(b"{}", more=more))
    return True


async def _floods_lists(_: Worker, stream: trio.SocketStream, request: Message) -> bool:
    path = request.line.split(" ")[1].partition("?")[0]
    entries = b",".join([b'{"x":1}'] * LARGE_LIST)
    if path == "/v1/models":
        await stream.send_all(counted(b'{"data":[%b]}' % entries))
    elif path in ("/v1/loads", "/get_load"):
        await stream.send_all(counted(b'{"loads":[%b]}' % entries))
    elif path == "/metrics":
        families = b"".join(b"# TYPE f%d counter\nf%d 1\n" % (n, n) for n in range(100_000))
        await stream.send_all(counted(families, kind="text/plain"))
    else:
        await stream.send_all(counted(b'{"detail": "Not Found"}', "404 Not Found"))
    return True


HOSTILE: Final[dict[str, Answer]] = {
    "floods_interim": _floods_interim,
    "garbage": _garbage,
    "tiny_chunks": _tiny_chunks,
    "hangs": _hangs,
    "hangs_up": _hangs_up,
    "spoofs": _spoofs,
    "floods_lists": _floods_lists,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.soak.workers", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("kind", choices=["honest", *HOSTILE])
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    trio.run(Worker(arguments.name, arguments.kind).serve, arguments.port)


if __name__ == "__main__":
    main()
