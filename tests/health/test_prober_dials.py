import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from omni_proxy.health import prober as prober_module
from omni_proxy.upstream_http import resolver
from tests.health.prober_fixture import NOW, URL, build_prober_fixture, worker_spec


@pytest.fixture
def health():
    return build_prober_fixture()


async def start_prober(health, nursery):
    await nursery.start(health.prober.run)


async def serve_health(listener, server):
    """Accept, read a head, respond, close; append each request to `server.probes`."""
    while True:
        stream = await listener.accept()
        async with stream:
            server.probes.append(bytes(await stream.receive_some(4096)))
            await stream.send_all(server.reply)


@pytest.fixture
async def health_server(nursery):
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = SimpleNamespace(
        probes=[], reply=b'HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{"v": 1}'
    )
    server.port = listener.socket.getsockname()[1]
    nursery.start_soon(serve_health, listener, server)
    yield server
    nursery.cancel_scope.cancel()
    await listener.aclose()


async def probe(health, nursery, url):
    await start_prober(health, nursery)
    worker = health.add(url)
    with trio.fail_after(30):
        await health.prober.probe_once(worker)
    return worker


async def test_a_probe_has_the_host_field_of_the_url(health, nursery, health_server):
    worker = await probe(health, nursery, f"http://127.0.0.1:{health_server.port}")
    head = health_server.probes[0].lower()
    assert head.startswith(b"get /health http/1.1\r\n")
    assert b"host: 127.0.0.1:%d\r\n" % health_server.port in head
    assert worker.health_body == {"v": 1}
    assert worker.health.consecutive_successes == 1


async def test_a_hostname_is_dialled_by_address_and_sent_as_the_host(
    health, nursery, health_server
):
    worker = await probe(health, nursery, f"http://localhost:{health_server.port}")
    assert worker.health.last_error is None
    assert worker.address == ("127.0.0.1", health_server.port)
    assert b"host: localhost:%d\r\n" % health_server.port in health_server.probes[0].lower()


async def test_the_next_address_is_dialled_when_one_refuses(
    health, nursery, health_server, monkeypatch
):
    async def two_addresses(host, port):
        return (("127.0.0.9", port), ("127.0.0.1", port))

    monkeypatch.setattr(prober_module, "addresses", two_addresses)
    worker = await probe(health, nursery, f"http://some.name:{health_server.port}")
    assert worker.health.last_error is None
    assert worker.address == ("127.0.0.1", health_server.port)


async def test_a_refused_connection_is_reported(health, nursery):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        worker = await probe(health, nursery, f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert "Connection refused" in worker.health.last_error
    assert worker.health.consecutive_failures == 1


async def test_an_invalid_response_is_a_failed_probe(health, nursery, health_server):
    health_server.reply = b"\x00\x01garbage\r\n\r\n"
    worker = await probe(health, nursery, f"http://127.0.0.1:{health_server.port}")
    assert worker.health.consecutive_failures == 1


async def test_a_redirect_is_not_followed(health, nursery, health_server):
    health_server.reply = (
        b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
    )
    worker = await probe(health, nursery, f"http://127.0.0.1:{health_server.port}")
    assert worker.health.last_error == "status=302"


async def test_a_unix_socket_worker_is_probed(health, nursery, tmp_path):
    path = tmp_path / "worker.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    server = SimpleNamespace(probes=[], reply=b"HTTP/1.1 204 No Content\r\n\r\n")
    trio_listener = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    nursery.start_soon(serve_health, trio_listener, server)
    worker = await probe(health, nursery, f"unix:{path}")
    assert worker.health.last_status_code == 204
    assert worker.address == str(path)
    nursery.cancel_scope.cancel()
    await trio_listener.aclose()


async def test_a_name_that_resolves_to_a_metadata_service_is_not_dialled(
    health, nursery, monkeypatch
):
    async def resolved_to_metadata(host, port, **hints):
        return [(2, 1, 6, "", ("127.0.0.1", port)), (2, 1, 6, "", ("169.254.169.254", port))]

    monkeypatch.setattr(resolver.trio.socket, "getaddrinfo", resolved_to_metadata)
    worker = await probe(health, nursery, "http://sly.example:80")
    assert "169.254.169.254" in worker.health.last_error
    assert worker.address == ("sly.example", 80)


async def test_the_probe_has_the_workers_own_key(health, nursery, health_server, monkeypatch):
    monkeypatch.setenv("WORKER_KEY", "w0rk")
    await start_prober(health, nursery)
    url = f"http://127.0.0.1:{health_server.port}"
    health.fleet.apply([replace(worker_spec(url), api_key_env="WORKER_KEY")], NOW)
    with trio.fail_after(30):
        await health.prober.probe_once(health.fleet.find(url))
    assert b"authorization: bearer w0rk" in health_server.probes[0].lower()


async def test_a_key_that_cannot_be_sent_fails_the_probe_only(health, nursery, monkeypatch):
    monkeypatch.setenv("WORKER_KEY", "schlüssel\N{SNOWMAN}")
    await start_prober(health, nursery)
    health.fleet.apply([replace(worker_spec(URL), api_key_env="WORKER_KEY")], NOW)
    worker = health.fleet.find(URL)
    with trio.fail_after(30):
        await health.prober.probe_once(worker)
    assert worker.health.consecutive_failures == 1


async def test_a_refused_connection_reports_a_lost_cache_once(health, nursery):
    cleared = []
    health.fleet.watch_cache_cleared(cleared.append)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        worker = await probe(health, nursery, "http://127.0.0.1:{1}".format(*unused.getsockname()))
        assert cleared == [worker]
        with trio.fail_after(30):
            await health.prober.probe_once(worker)
        assert (cleared, worker.health.consecutive_failures) == ([worker], 2)


async def test_the_instance_in_the_header_has_precedence_over_the_body(
    health, nursery, health_server
):
    cleared = []
    health.fleet.watch_cache_cleared(cleared.append)
    head = "HTTP/1.1 200 OK\r\nx-omni-instance: {}\r\ncontent-length: 17\r\n\r\n"
    same_body = '{"instance": "x"}'
    health_server.reply = (head.format("one") + same_body).encode()
    worker = await probe(health, nursery, f"http://127.0.0.1:{health_server.port}")
    assert (cleared, worker.instance) == ([], "one")
    health_server.reply = (head.format("two") + same_body).encode()
    with trio.fail_after(30):
        await health.prober.probe_once(worker)
    assert (cleared, worker.instance) == ([worker], "two")
