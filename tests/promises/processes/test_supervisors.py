import gc
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.lowlevel

from omni_proxy import server, supervisor
from omni_proxy.config.configuration_flags import Startup
from omni_proxy.fleet.registry import Fleet
from omni_proxy.health.prober import Prober
from omni_proxy.launch.launcher import Launcher
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.reloader import Reloader
from tests.promises.support.fleet_program import PATIENCE_SECS, chat, put, toml, workers


@pytest.fixture(autouse=True)
def fast_restarts(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECS", 0.02)
    monkeypatch.setattr(server, "configure", lambda level, form: None)
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@asynccontextmanager
async def running_server(tmp_path, fleet):
    """Runs the whole program inside the test process; yields a client."""
    file = tmp_path / "proxy.toml"
    put(file, toml(fleet))
    workers_registry = Fleet()
    config_store = ConfigStore(Startup(file, {}, (), ""), workers_registry)
    async with trio.open_nursery() as nursery:
        proxy = server.Server(config_store, workers_registry, tmp_path)
        nursery.start_soon(proxy.run)
        with trio.fail_after(PATIENCE_SECS):
            while not proxy.data_plane.addresses():
                await trio.sleep(0.01)
        base = f"http://{proxy.data_plane.addresses()[0]}"
        async with httpx.AsyncClient(
            base_url=base, trust_env=False, timeout=5, verify=False
        ) as client:
            yield client
        nursery.cancel_scope.cancel()


async def until_listed(client, name, state) -> dict:
    with trio.fail_after(PATIENCE_SECS):
        while True:
            response = await client.get("/status")
            rows = response.json()["supervisors"] if response.is_success else []
            for row in rows:
                if (row["name"], row["state"]) == (name, state):
                    return row
            await trio.sleep(0.01)


def fail_until(service, monkeypatch, repaired: trio.Event):
    """Makes `service.run` raise until the event is set."""
    real = service.run

    async def run(self, task_status=trio.TASK_STATUS_IGNORED):
        if not repaired.is_set():
            raise RuntimeError("the disk is on fire")
        await real(self, task_status=task_status)

    monkeypatch.setattr(service, "run", run)


@pytest.mark.parametrize(
    ("name", "service"), [("prober", Prober), ("launcher", Launcher), ("reloader", Reloader)]
)
async def test_a_failed_service_is_restarted_and_never_stops_the_data_plane(
    tmp_path, monkeypatch, name, service
):
    repaired = trio.Event()
    async with workers("one") as fleet:
        fail_until(service, monkeypatch, repaired)
        async with running_server(tmp_path, fleet) as client:
            row = await until_listed(client, name, "backing_off")
            assert row["restarts"] >= 1
            assert row["last_error"] == "RuntimeError: the disk is on fire"
            response = await client.post("/v1/chat/completions", json=chat())
            assert response.status_code in (200, 503)  # without a prober no worker is healthy
            repaired.set()
            assert (await until_listed(client, name, "running"))["last_error"]
            with trio.fail_after(PATIENCE_SECS):
                while (await client.get("/ready")).status_code != 200:
                    await trio.sleep(0.01)
            response = await client.post("/v1/chat/completions", json=chat())
            assert response.json() == {"worker": "one"}


async def test_a_failed_admin_api_restarts_without_affecting_model_traffic(tmp_path, monkeypatch):
    broken, repaired, real = trio.Event(), trio.Event(), server.serve

    async def serve(app, path, *, task_status=trio.TASK_STATUS_IGNORED):
        async with trio.open_nursery() as nursery:
            await nursery.start(real, app, path)
            task_status.started()
            await broken.wait()
            if not repaired.is_set():
                raise RuntimeError("the front fell")

    monkeypatch.setattr(server, "serve", serve)
    async with workers("one") as fleet, running_server(tmp_path, fleet) as client:
        with trio.fail_after(PATIENCE_SECS):
            while (await client.get("/ready")).status_code != 200:
                await trio.sleep(0.01)
        broken.set()
        with trio.fail_after(PATIENCE_SECS):
            while (await client.get("/live")).status_code != 503:
                await trio.lowlevel.checkpoint()
        response = await client.post("/v1/chat/completions", json=chat())
        assert response.json() == {"worker": "one"}
        repaired.set()
        row = await until_listed(client, "admin_api", "running")
        assert row["restarts"] >= 1
        assert row["last_error"] == "RuntimeError: the front fell"
