"""A change of one worker does not depend on the size of the fleet; a large fleet starts up."""

import random

import pytest
import trio

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.server import Server
from tests.fleet.entries import NOW
from tests.promises.support.fleet_program import program
from tools.http_requests import RequestReader

MANY = 300
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


class CountingFleet(Fleet):
    """Counts how often all of its workers are read."""

    walks = 0

    @property
    def workers(self):
        self.walks += 1
        return super().workers


@pytest.fixture
async def running_server(tmp_path):
    """The server with all services over many workers; none of them runs."""
    file = tmp_path / "proxy.toml"
    urls = "".join(f'[[workers]]\nurl = "http://w{number}:1"\n' for number in range(MANY))
    file.write_text(f'[server]\nport = 0\nstate_file = "off"\n{urls}')
    config_store = ConfigStore(Startup(file, {}, (), ""), CountingFleet())
    server = Server(config_store, config_store.fleet, tmp_path)
    server.data_plane.listeners.held = True
    config_store.start()
    yield server
    server.data_plane.listeners.close()
    server.data_plane.loop.flush()


async def test_a_health_change_of_one_worker_scans_no_other(running_server):
    fleet = running_server.config_store.fleet
    workers = fleet.workers
    fleet.walks = 0
    for worker in random.sample(workers, 20):
        for _ in range(fleet.thresholds.rise):
            fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
        fleet.cordon(worker, "updating")
        fleet.uncordon(worker, "updating")
        fleet.set_version(worker, "v1", 0)
        fleet.mark_dead(worker, NOW)
        assert worker.health.state is Health.DEAD
    assert fleet.walks == 0


async def serve(stream):
    async with stream:
        if await RequestReader(stream).read():
            await stream.send_all(ANSWER)


async def test_hundreds_of_workers_all_become_routable(tmp_path, nursery):
    listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(MANY)]
    await nursery.start(trio.serve_listeners, serve, listeners)
    ports = [listener.socket.getsockname()[1] for listener in listeners]
    urls = "".join(f'[[workers]]\nurl = "http://127.0.0.1:{port}"\n' for port in ports)
    file = tmp_path / "proxy.toml"
    file.write_text(f"[server]\nport = 0\n[health]\nsuccess_threshold = 1\n{urls}")
    async with program("--config", file) as running:
        body = await running.until("/health", lambda body: body["routable_workers"] == MANY)
    assert body["total_workers"] == MANY
