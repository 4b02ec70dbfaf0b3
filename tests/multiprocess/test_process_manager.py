"""The main process as it starts data-plane processes, with real sockets."""

import errno
import os

import pytest

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.dataplane import dataplane as dataplane_module
from omni_proxy.dataplane.accept.listener import Listener
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.fleet.registry import Fleet
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.instruments import Instruments
from omni_proxy.telemetry.line_log import LineLog
from tests.multiprocess.limited_loop import LimitedLoop


@pytest.fixture
async def running_server(nursery, tmp_path, logging_as_it_was, monkeypatch):
    """A configuration file, its store, and the process manager, which starts with one process."""
    monkeypatch.setattr(dataplane_module, "EventLoop", LimitedLoop)
    file = tmp_path / "proxy.toml"
    file.write_text("[server]\nport = 0\n")
    fleet, socket = Fleet(), str(tmp_path / "front")
    config_store = ConfigStore(Startup(file, {}, (), ""), fleet)
    dataplane = DataPlane(
        fleet, config_store.config, admin_socket=socket, sources=Sources(lambda _: 0)
    )
    logs = {"access_log": LineLog(), "route_log": LineLog()}
    processes = ProcessManager(fleet, dataplane, Instruments(fleet, lambda: (0, 0), logs), socket)
    config_store.add_prepare(processes.prepare)
    await nursery.start(dataplane.run)
    await nursery.start(processes.run)
    config_store.start()
    return file, config_store, processes


def failing_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("text", "error_number"),
    [
        ("[server]\nport = 0\nprocesses = 2\n", errno.EMFILE),
        ("[server]\nhost = '127.0.0.2'\nport = 0\nprocesses = 2\n", errno.EMFILE),
        ("[server]\nhost = '127.0.0.2'\nport = 0\nprocesses = 2\n", errno.ENOSPC),
        ("[admin]\nlisten = 'unix:FOLDER/a'\n[server]\nport = 0\n", errno.ENOSPC),
    ],
)
async def test_a_reload_without_free_descriptors_changes_nothing_and_works_later(
    running_server, monkeypatch, tmp_path, text, error_number
):
    file, config_store, processes = running_server
    before, descriptors = (
        (config_store.config, processes.dataplane.addresses()),
        set(os.listdir("/proc/self/fd")),
    )
    if error_number == errno.EMFILE:
        monkeypatch.setattr(Listener, "dup_socket", failing_with(error_number))
    processes.dataplane.loop.full = error_number == errno.ENOSPC
    file.write_text(text.replace("FOLDER", str(tmp_path)))
    result = await config_store.reload("file")
    assert (result.outcome, result.revision) == ("refused", 1)
    assert os.strerror(error_number) in str(result.error)
    assert (config_store.config, processes.dataplane.addresses()) == before
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()
    processes.dataplane.loop.full = False
    assert (await config_store.reload("file")).outcome == "applied"
    assert len(processes.slots) == (2 if "processes" in text else 0)
