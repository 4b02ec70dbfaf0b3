"""Workers whose addresses are this proxy itself, or lead back to it."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.support.fleet_program import chat, program, put, routable, toml, workers

pytestmark = pytest.mark.usefixtures("soon")


async def test_the_proxys_own_addresses_are_refused_as_workers(tmp_path):
    file = tmp_path / "proxy.toml"
    port, admin = free_port(), free_port()
    async with workers("w") as fleet:
        more = f"[admin]\nlisten = '127.0.0.1:{admin}'\nlisten_key = false\n"
        put(file, toml(fleet, port=port, more=more))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{admin}", verify=False
            ) as client:
                for url in (
                    f"http://127.0.0.1:{port}", f"http://localhost:{port}",
                    f"http://0.0.0.0:{port}", f"http://[::ffff:127.0.0.1]:{port}",
                    f"http://127.0.0.1:{admin}",
                ):  # fmt: skip
                    added = await client.post("/workers", json={"url": url})
                    scaled = await client.post(f"/add_worker?url={url}")
                    for answer in (added, scaled):
                        assert answer.status_code == 400, url
                        assert answer.json()["error"]["code"] == "worker_url_refused"
                put(file, toml(fleet, port=port, more=more) + entry(f"http://127.0.0.1:{port}"))
                answer = await client.post("/reload")
                assert answer.status_code == 422
                assert "this proxy itself" in answer.text
            assert (await running.ask()).status_code == 200


def entry(url):
    return f'[[workers]]\nurl = "{url}"\n'


@asynccontextmanager
async def forwarder(port):
    """Another address that leads to the port, which the proxy cannot see in its configuration."""

    async def forward(stream):
        async with (
            stream,
            await trio.open_tcp_stream("127.0.0.1", port) as other,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(copy, stream, other, nursery.cancel_scope)
            nursery.start_soon(copy, other, stream, nursery.cancel_scope)

    async def copy(source, sink, scope):
        try:
            async for piece in source:
                await sink.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, forward, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_a_worker_that_leads_back_to_the_proxy_gets_no_request(tmp_path):
    file = tmp_path / "proxy.toml"
    port = free_port()
    async with workers("w") as fleet, forwarder(port) as url:
        put(file, toml(fleet, port=port) + entry(url))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)

            def is_detected(body):
                (row,) = (row for row in body["workers"] if row["url"] == url)
                error = "the address of this worker is this proxy itself: remove it"
                return row["last_error"] == error

            body = await running.until("/workers", is_detected)
            assert routable(body) == {fleet[0].url}
            for _ in range(4):
                assert (await running.ask()).status_code == 200


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
async def test_a_loop_of_proxies_ends_with_508(tmp_path, count, processes):
    """Each proxy has the next one as its worker. The first also has a real worker until all are
    healthy, since a proxy is healthy only once a worker of it is."""
    ports = [free_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with workers("w") as fleet, AsyncExitStack() as stack:
        proxies = []
        for at, port in enumerate(ports):
            file = tmp_path / f"{at}.toml"
            next_proxy = entry(urls[(at + 1) % count])
            real = [] if at else fleet
            more = f"processes = {processes}\n"
            put(file, toml(real, port=port, more=more) + next_proxy)
            proxies.append(await stack.enter_async_context(program("--config", file)))
        for at, proxy in enumerate(proxies):
            expected = {urls[(at + 1) % count]} | ({fleet[0].url} if not at else set())
            await proxy.until(
                "/workers", lambda body, expected=expected: routable(body) == expected
            )
        name = fleet[0].url.replace(":", "%3A").replace("/", "%2F")
        assert (await proxies[0].client.put(f"/workers/{name}", json={"disabled": True})).is_success
        for proxy in proxies:
            with trio.fail_after(30):
                answer = await proxy.ask()
            assert answer.status_code == 508
            assert answer.json()["error"]["code"] == "loop_detected"
            streamed = await proxy.client.post("/v1/chat/completions", json=chat(stream=True))
            assert streamed.status_code == 508
        with trio.fail_after(30):
            for path in ("/v1/models", "/get_loads", "/server_info"):
                await proxies[0].client.get(path)
        assert fleet[0].requests == 0
        body = await proxies[0].get_json("/status")
        assert body["data_plane"]["accepted"] < 300, json.dumps(body["data_plane"])
