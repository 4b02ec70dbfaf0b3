"""The root nursery: what runs, in which order it starts, and how it ends.

Invariant: nothing is bound before the configuration has been judged, and the door outlives every
supervisor. The first SIGTERM or SIGINT drains, a second one cuts; both end with exit status 0.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import secrets
import signal
import sys
from pathlib import Path

import trio
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.admin_api.app import create_app
from omni_proxy.admin_api.hypercorn_server import serve
from omni_proxy.admin_api.services import Services
from omni_proxy.config.flags import Startup
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.outlier_ejector import OutlierEjector
from omni_proxy.health.prober import Prober
from omni_proxy.health.voice_list import VoiceList
from omni_proxy.launch.launcher import Launcher
from omni_proxy.launch.startup_progress import wait_until_ready
from omni_proxy.launch.worker_link import CORDON
from omni_proxy.multiprocess.aggregate import AggregateView
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.reloader import Reloader
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.supervisor import Supervisor
from omni_proxy.system.fd_limit import raise_fd_limit
from omni_proxy.system.runtime_dir import private_runtime_dir
from omni_proxy.telemetry.instruments import Instruments
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.logs import configure
from omni_proxy.watchdog import Watchdog
from omni_proxy.weight_sync.operations.weight_operations import WeightOperations
from omni_proxy.weight_sync.state.journal_file import JournalFile, folder_for

_log = logging.getLogger(__name__)

BAD_CONFIGURATION = 2
CANNOT_LISTEN = 1
NEVER_READY = 1


def run(startup: Startup) -> int:
    """Serve until told to stop; the exit status."""
    fleet = Fleet()
    try:
        config_store = ConfigStore(startup, fleet)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201  the log isn't configured yet
        return BAD_CONFIGURATION
    configure(config_store.config.server.log_level, config_store.config.server.log_format)
    for line in startup.warnings:
        _log.warning("%s", line)
    raise_fd_limit()
    with private_runtime_dir() as private:
        return trio.run(Server(config_store, fleet, private).run)


def _log_health(worker: Worker, before: Health) -> None:
    now, why = worker.health.state, worker.health.last_error
    if CORDON in worker.cordon_reasons:  # its launch tells how that goes
        _log.debug("Worker %s is not in use yet: from %s to %s", worker.url, before, now)
        return
    level = logging.INFO if now in (Health.HEALTHY, Health.UNKNOWN) else logging.WARNING
    reason = f": {why}" if why and level == logging.WARNING else ""
    _log.log(
        level, "Worker %s health state changed from %s to %s%s", worker.url, before, now, reason
    )


def _tell(line: str) -> None:
    """To whoever waits at the terminal, whatever the log's level and format."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  see above


class Server:
    """Every room of the running program, wired once."""

    def __init__(self, config_store: ConfigStore, fleet: Fleet, private: Path) -> None:
        config = config_store.config
        front_socket = private / "front.sock"
        self.config_store = config_store
        self.access_log = LineLog(config.server.access_log)
        self.route_log = LineLog(config.server.route_log)
        proxy_id = secrets.token_hex(16)
        self.door = DataPlane(
            fleet, config,
            front_socket=str(front_socket), below=random.randrange, proxy_id=proxy_id,
        )  # fmt: skip
        self.prober = Prober(fleet, config_store, jitter=random.random)
        self.prober.proxy_id = proxy_id
        self.launcher = Launcher(fleet, config_store, self.prober)
        self.ejector = OutlierEjector(fleet, config_store)
        self.drains = WorkerDrains(fleet, config_store)
        kept = config_store.state.voices
        self.door.voices.restore(kept.owner, kept.names)
        self.voice_list = VoiceList(fleet, self.door.voices, config_store.save_voices)
        self.instruments = Instruments(
            fleet,
            lambda: self.view.load,
            {"access_log": self.access_log, "route_log": self.route_log},
        )
        self.process_manager = ProcessManager(fleet, self.door, self.instruments, str(front_socket))
        self.watchdog = Watchdog()
        self.view = AggregateView(self.process_manager, self.watchdog)
        fleet.await_replicated = self.process_manager.await_replicated
        self.reloader = Reloader(config_store)
        folder = folder_for(config_store.state_file, config, os.environ)
        self.desk = WeightOperations(fleet, config_store, JournalFile(folder))
        self.prober.tolerates_failures = self.desk.is_updating
        self.leaving = False
        self.supervisors: list[Supervisor] = []
        rooms = Services(
            fleet=fleet,
            config_store=config_store,
            prober=self.prober,
            data_plane=self.view,
            weight_operations=self.desk,
            launcher=self.launcher,
            instruments=self.instruments,
            drains=self.drains,
            supervisors=lambda: [supervisor.status() for supervisor in self.supervisors],
            leaving=lambda: self.leaving,
            dialect=config_store.startup.dialect,
            given=config_store.startup.flag_urls,
            proxy_id=proxy_id,
        )
        # A QuartTrio can be served once only, so a restarted front gets a new one.
        self.front = Supervisor(
            "front", lambda told: serve(self._app(rooms), front_socket, task_status=told)
        )
        self.supervisors = self._supervised()
        fleet.watch_health(_log_health)
        config_store.add_prepare(self.process_manager.prepare)
        config_store.subscribe(self._follow_config)

    def _supervised(self) -> list[Supervisor]:
        """In the order in which they start and are shown."""
        return [
            Supervisor("access_log", lambda told: self.access_log.run(task_status=told)),
            Supervisor("route_log", lambda told: self.route_log.run(task_status=told)),
            self.front,
            Supervisor("weights", lambda told: self.desk.run(task_status=told)),
            Supervisor("prober", lambda told: self.prober.run(task_status=told)),
            Supervisor("launcher", lambda told: self.launcher.run(task_status=told)),
            Supervisor("ejector", lambda told: self.ejector.run(task_status=told)),
            Supervisor("drains", lambda told: self.drains.run(task_status=told)),
            Supervisor("voice_list", lambda told: self.voice_list.run(task_status=told)),
            Supervisor("pulse", lambda told: self.instruments.ticker.run(task_status=told)),
            Supervisor("reloader", lambda told: self.reloader.run(task_status=told)),
        ]

    def _app(self, rooms: Services) -> QuartTrio:
        """It knows what is in flight at every door, and what it has answered holds there."""
        app = create_app(rooms)

        async def counted() -> None:
            self.process_manager.count()

        async def agreed(response: Response) -> Response:
            if request.method not in ("GET", "HEAD"):
                await self.process_manager.await_replicated()
            return response

        app.before_request(counted)
        app.after_request(agreed)
        return app

    async def run(self) -> int:
        _log.info("omni-proxy %s starts", __version__)
        async with trio.open_nursery() as root:
            await root.start(self.watchdog.run)
            # The front first: what can be reached can be answered from its first moment on.
            await root.start(self.door.run)
            await root.start(self.process_manager.run)
            await root.start(self.front.run)
            self.door.listeners.held = bool(self.config_store.startup.launch)
            try:
                self.config_store.start()
            except OSError as error:
                root.cancel_scope.cancel()
                return self._cannot_listen(error)
            root.start_soon(self._signals, root.cancel_scope)
            for supervisor in self.supervisors:
                if supervisor is not self.front:
                    await root.start(supervisor.run)
            # What exists now stays: keep the collector from walking it again and again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 50)
            self.watchdog.begin()
            if self.door.listeners.held:
                status = await self._open_when_ready()
                if status:
                    root.cancel_scope.cancel()
                    return status
        _log.info("omni-proxy has stopped")
        return 0

    async def _open_when_ready(self) -> int:
        """Let clients in once the replicas of the command line are ready; the exit status where
        that can't be."""
        launch = self.config_store.startup.launch
        longest = max(entry.ready_timeout_secs or math.inf for entry in launch)
        launcher = self.launcher
        failed = await wait_until_ready(launcher.status, launcher.wait_state_change, _tell, longest)
        if failed:
            _tell(f"giving up: {failed}")
            return NEVER_READY
        try:
            self.process_manager.open()
        except OSError as error:
            return self._cannot_listen(error)
        for url in self.door.listeners.urls():
            _tell(f"serving on {url}")
        return 0

    def _cannot_listen(self, error: OSError) -> int:
        server = self.config_store.config.server
        where = error.filename or f"{server.host}:{server.port}"
        _log.error("cannot listen on %s: %s", where, error.strerror or error)
        return CANNOT_LISTEN

    def _follow_config(self, old: Config, new: Config) -> None:
        server = new.server
        configure(server.log_level, server.log_format)
        self.access_log.retarget(server.access_log)
        self.route_log.retarget(server.route_log)
        self.door.recorders.access_log = self.access_log if self.access_log.on else None
        self.door.recorders.route_log = self.route_log if self.route_log.on else None
        self.door.recorders.meters = self.instruments.metrics if server.metrics else None

    async def _signals(self, everything: trio.CancelScope) -> None:
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGHUP, signal.SIGTERM, signal.SIGINT) as came:
                async for number in came:
                    if number == signal.SIGHUP:
                        self.reloader.request_reload("SIGHUP")
                    elif self.leaving:
                        _log.warning("a second signal: cutting what is left")
                        everything.cancel()
                    else:
                        self.leaving = True
                        nursery.start_soon(self._leave, everything)

    async def _leave(self, everything: trio.CancelScope) -> None:
        server = self.config_store.config.server
        if server.ready_off_secs:
            _log.info("shutting down: /ready fails for %g s, then draining", server.ready_off_secs)
            await trio.sleep(server.ready_off_secs)
        _log.info("draining: up to %g s for what is in flight", server.drain_timeout_secs)
        self.process_manager.begin_drain()
        with trio.move_on_after(server.drain_timeout_secs) as scope:
            await self.process_manager.drained()
        if scope.cancelled_caught:
            left = self.view.counts()["connections"]
            _log.warning("%d connections are cut: their time to drain is over", left)
        everything.cancel()
