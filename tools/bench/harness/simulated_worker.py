"""A worker in this process that answers every request after a fixed time.

For measuring shares of work between workers of known speed; it does not model an engine.
"""

import trio

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def stand_in(
    delay_secs: float, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; starts with its URL."""

    async def serve(stream: trio.SocketStream) -> None:
        try:
            rest = b""
            while (found := await next_request(stream, rest)) is not None:
                head, _, rest = found
                if head.startswith(b"POST"):
                    await trio.sleep(delay_secs)
                await stream.send_all(ANSWER)
        except trio.BrokenResourceError:
            pass  # the proxy has closed it

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
    await trio.serve_listeners(serve, [listener])


async def next_request(stream: trio.SocketStream, rest: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The next request's head and body, and the bytes after it; None at the end of the stream."""
    while b"\r\n\r\n" not in rest:
        piece = await stream.receive_some(65536)
        if not piece:
            return None
        rest += piece
    head, _, rest = rest.partition(b"\r\n\r\n")
    size = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            size = int(line.partition(b":")[2])
    while len(rest) < size:
        piece = await stream.receive_some(65536)
        if not piece:
            return None
        rest += piece
    return head, rest[:size], rest[size:]
