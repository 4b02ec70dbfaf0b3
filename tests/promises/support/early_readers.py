"""A worker whose script runs before the request body is received, and controls when the body is read."""

import trio

from tests.promises.support.fakes import PATIENCE_SECS, Call, counted

MIB = 1024 * 1024
CHAT = "/v1/chat/completions"
SPOKEN = "/v1/audio/transcriptions"
HINTS = ("x-sglang-omni-route-model: m", "x-sglang-omni-route-capabilities: chat")
BOUNDARY = "content-type: multipart/form-data; boundary=x"
FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
END = b"\r\n--x--\r\n"
MODEL = """
[[workers]]
url = "{}"
model = "m"
capabilities = ["chat", "streaming", "audio_input"]
"""


def head(length, *fields, path=CHAT, kind="content-type: application/json"):
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = [f"POST {path} HTTP/1.1", "host: proxy", framing, kind, *fields, "", ""]
    return "\r\n".join(lines).encode()


class EarlyReader(Call):
    """A worker's connection whose script starts once the head of a request is complete."""

    length = 0

    async def until(self, most: int) -> bytes:
        """Returns the raw body once at least `most` bytes are received."""
        while len(self.body) < most:
            piece = await self.receive()
            assert piece, f"closed after {len(self.body)} bytes of a body"
            self.body += piece
        return self.body


class EarlyReaders:
    """One worker; `script(taker)` runs for each connection once a head is complete."""

    def __init__(self, script) -> None:
        self.script = script
        self.taker = None
        self.connections = 0
        self.url = ""

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = "http://{}:{}".format(*listener.socket.getsockname())
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)

    async def _connection(self, stream):
        taker = EarlyReader(stream)
        received = b""
        try:
            while b"\r\n\r\n" not in received:
                piece = await taker.receive()
                if not piece:
                    return
                received += piece
            taker.head, taker.body = received.split(b"\r\n\r\n", 1)
            self.taker = taker
            self.connections += 1
            await self.script(taker)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


async def ended(opened, client):
    """Closes the client; returns the access-log line of its exchange."""
    client.close()
    with trio.fail_after(PATIENCE_SECS):
        await opened.dataplane.drained()
    return opened.last


def whole(taker, length):
    async def read():
        body = await taker.until(length)
        await taker.send(counted(b"%d" % len(body)))

    return read()
