import pytest
import trio

from omni_proxy.upstream_http.client import open_client
from tests.fleet.entries import entry, fleet_of

TINY = b"1\r\nx\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("flood", [b"HTTP/1.1 102 Processing\r\n\r\n", TINY])
async def test_a_flood_of_heads_or_chunks_leaves_the_loop_a_turn_after_each_small_read(
    nursery, flood
):
    """Counts turns instead of measuring time: 256 KiB are available at the first read."""
    turns, total = 0, 256 * 1024
    first = b"" if flood != TINY else HEAD
    rest = first + flood * (total // len(flood)) + (HEAD if not first else b"") + b"0\r\n\r\n"

    async def answer(stream):
        await stream.receive_some()
        await stream.send_all(rest)

    async def count():
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, answer, [listener])
    nursery.start_soon(count)
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    (worker,) = fleet_of(entry("a")).workers  # its address is not used
    async with open_client(worker) as client:
        before = turns
        response = await client.get(url)
    assert response.status_code == 200
    assert turns - before > 32  # in each turn at most 8 KiB are parsed
