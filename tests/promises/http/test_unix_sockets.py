"""Unix sockets as the addresses of the proxy and of workers."""

import socket

import httpx
import pytest
import trio

from tests.promises.http.test_tls_program import command
from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import FakeWorker, answering, counted
from tests.promises.support.fleet_program import starting, toml, workers

pytestmark = pytest.mark.usefixtures("soon")


class UnixWorker(FakeWorker):
    """A worker that listens on a socket file."""

    async def serve_at(self, path, *, task_status=trio.TASK_STATUS_IGNORED):
        sock = trio.socket.socket(socket.AF_UNIX)
        await sock.bind(str(path))
        sock.listen()
        self.url = f"unix:{path}"
        await trio.serve_listeners(
            self._connection, [trio.SocketListener(sock)], task_status=task_status
        )


async def test_a_worker_may_listen_on_a_socket_file(tmp_path):
    worker = UnixWorker(answering(counted(b"{}")))
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.serve_at, tmp_path / "worker.sock")
        async with run_dataplane(worker) as opened, opened.client() as client:
            for _ in range(2):
                await client.send(post())
                assert (await client.answer()).status == 200
        nursery.cancel_scope.cancel()
    assert len(worker.calls) == 1
    assert ("host", "localhost") in worker.calls[0].fields


async def test_a_listener_replaces_a_stale_socket_file_and_removes_its_own(tmp_path):
    file, path = tmp_path / "proxy.toml", tmp_path / "proxy.sock"
    stale = trio.socket.socket(trio.socket.AF_UNIX)
    await stale.bind(str(path))
    stale.close()
    async with workers("w") as fleet:
        more = f"host = 'unix:{path}'\nunix_mode = '0600'\n"
        file.write_text(toml(fleet, port=30000, more=more))
        async with starting("--config", file) as running:
            await running.until_logged(f"listener_opened url=unix:{path}")
            assert path.stat().st_mode & 0o777 == 0o600
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            await running.client.aclose()
            running.client = httpx.AsyncClient(base_url="http://x", transport=transport)
            await running.until_routable(*fleet)
            assert (await running.ask()).status_code == 200
            status, body = await command("--config", file)
            assert status == 1, body
            assert f'listen_failed address=unix:{path} error="another program' in body
            assert (await running.ask()).status_code == 200
        assert not path.exists()
