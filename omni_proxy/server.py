"""The composition root: builds every service, starts them in order in one nursery, ends them.

Invariant: no listener is bound before the configuration is validated, and the data plane outlives
every supervisor. `signals` ends the program, with exit status 0.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import socket
import sys
import time
from pathlib import Path

import trio
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.admin_api.app import create_app
from omni_proxy.admin_api.hypercorn_server import serve
from omni_proxy.admin_api.services import (
    KeyServices,
    KvEventFacts,
    ProcessFacts,
    Services,
    TelemetryServices,
    WorkerServices,
)
from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.cluster_member.figures import OwnFigures, ProxyLoad
from omni_proxy.cluster_member.member import ClusterMember
from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.dataplane.dataplane import DataPlane, Sources, random_below
from omni_proxy.discovery_watch.discovery import Discovery
from omni_proxy.fleet.registry import Fleet
from omni_proxy.health.engine_pages import EnginePages
from omni_proxy.health.engine_readers import AdapterList, EngineLoadReader, EngineRanks, EngineRoles
from omni_proxy.health.outlier_removal import OutlierRemoval
from omni_proxy.health.prober import Prober, log_health
from omni_proxy.health.voice_list import VoiceList
from omni_proxy.kv_events.event_follower import EventFollower
from omni_proxy.launch.launcher import Launcher, wait_until_ready
from omni_proxy.multiprocess.aggregate import AggregateView
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.picker.picker import Picker
from omni_proxy.picker.service import PickerService
from omni_proxy.routing.tree_key import hash_with
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.key_sources import KeySources
from omni_proxy.runtime_config.reloader import Reloader
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.shared.watchdog import Watchdog
from omni_proxy.signals import SignalHandler
from omni_proxy.supervisor import Supervisor
from omni_proxy.system.fd_limit import raise_fd_limit
from omni_proxy.system.garbage import collect_before_serving, exempt_objects
from omni_proxy.system.runtime_dir import private_runtime_dir
from omni_proxy.system.systemd import ServiceManager
from omni_proxy.telemetry.instruments import Instruments
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.logs import configure
from omni_proxy.telemetry.span_exporter import encode_operation_span
from omni_proxy.upgrade.control_socket import UpgradeService
from omni_proxy.upgrade.incoming import Incoming, NoState, NotReady, take_state
from omni_proxy.upgrade.program_parts import ProgramParts
from omni_proxy.weight_sync.state_journal import JournalFile, folder_for
from omni_proxy.weight_sync.weight_operations import WeightOperations

_log = logging.getLogger(__name__)

BAD_CONFIGURATION = 2
CANNOT_LISTEN = NEVER_READY = 1
OPEN_SECS = 5.0  # how long a change over HTTP waits until all services have started
NOT_TAKEN_OVER = 3  # exit status of a failed upgrade: the running program continues


def run(startup: Startup) -> int:
    """Serve until a signal ends the program; returns the exit status."""
    fleet = Fleet()
    incoming = Incoming.from_environment(os.environ)
    try:
        config_store = ConfigStore(startup, fleet)
        if incoming is not None:  # files may have changed until the state was received
            startup, incoming = take_state(incoming, startup)
            fleet = Fleet()
            config_store = ConfigStore(startup, fleet)
        if incoming is not None:
            incoming.adopt_state(config_store)
    except (ConfigError, NoState) as error:
        print(error, file=sys.stderr)  # noqa: T201  the log isn't configured yet
        return NOT_TAKEN_OVER if isinstance(error, NoState) else BAD_CONFIGURATION
    configure(config_store.config.server.log_level, config_store.config.server.log_format)
    raise_fd_limit()
    with private_runtime_dir() as runtime_dir:
        server = Server(config_store, fleet, runtime_dir, incoming)
        log = config_store.config.server
        configure(log.log_level, log.log_format, server.logs["log_file"])
        for line in startup.warnings:
            _log.warning("%s", line)
        return trio.run(server.run)


def _log_targets(config: Config) -> dict[str, str]:
    """The target of each log, in the order in which they start."""
    server = config.server
    return {
        "access_log": server.access_log,
        "route_log": server.route_log,
        "audit_log": config.admin.audit_log,
        "log_file": server.log_file,
    }


def _print(line: str) -> None:
    """Print to the terminal, whatever the level and format of the log."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  see above


class Server:
    """All services of the running program."""

    def __init__(
        self,
        config_store: ConfigStore,
        fleet: Fleet,
        runtime_dir: Path,
        incoming: Incoming | None = None,
    ) -> None:
        """`incoming`: the takeover from a running program."""
        config = config_store.config
        self._incoming = incoming
        self._handed_over = trio.Event()  # to the program that an upgrade has started
        self._is_activated = False  # systemd has opened the sockets
        self.service_manager = ServiceManager(os.environ, os.getpid())
        admin_socket = runtime_dir / "admin.sock"
        self.config_store = config_store
        self.logs = {name: LineLog(target) for name, target in _log_targets(config).items()}
        proxy_id = secrets.token_hex(16)
        seed = incoming.state.tree_seed if incoming else None
        self._tree_seed = secrets.randbits(64) if seed is None else seed
        hash_with(self._tree_seed)
        self.data_plane = DataPlane(
            fleet, config,
            admin_socket=str(admin_socket), sources=Sources(random_below), proxy_id=proxy_id,
        )  # fmt: skip
        self.prober = Prober(fleet, config_store, jitter=random.random)
        self.prober.proxy_id = proxy_id
        self.launcher = Launcher(fleet, config_store, self.prober)
        self.outlier_removal = OutlierRemoval(fleet, config_store)
        self.drains = WorkerDrains(fleet, config_store)
        self.adapter_list = AdapterList(fleet)
        self.discovery = Discovery(fleet, config_store, random.random)
        self.engine_pages = self._build_engine_pages(fleet)
        voices = config_store.state.voices
        self.data_plane.voices.restore(voices.owner, voices.names)
        self.voice_list = VoiceList(fleet, self.data_plane.voices, config_store.save_voices)
        self.instruments = Instruments(fleet, lambda: self.view.load, self.logs)
        file = str(config_store.file or "")
        self.caller_keys = KeySources(("keys",), lambda config: config.keys, file)
        self.admin_keys = KeySources(("admin", "keys"), lambda config: config.admin.keys, file)
        self.process_manager = ProcessManager(
            fleet, self.data_plane, self.instruments, str(admin_socket), self.caller_keys
        )
        self.watchdog = Watchdog()
        self.view = AggregateView(self.process_manager, self.watchdog)
        fleet.await_replicated = self.process_manager.await_replicated
        self.reloader = Reloader(config_store, self.service_manager)
        folder = folder_for(config_store.state_file, config, os.environ)
        self.weight_operations = WeightOperations(fleet, config_store, JournalFile(folder))
        self.cluster = self._build_cluster(fleet)
        self.weight_operations.history.on_end = self._trace_operation
        self.prober.tolerates_failures = self.weight_operations.is_updating
        self.supervisors: list[Supervisor] = []
        self.upgrades = UpgradeService(self._program_parts(admin_socket))
        self.signals = self._build_signals()
        self.admin_api = self._supervise_admin_api(self._build_services(proxy_id), admin_socket)
        self.supervisors = self._build_supervisors()
        config_store.add_prepare(self.admin_keys.prepare)
        config_store.add_prepare(self.caller_keys.prepare)
        config_store.add_prepare(self.process_manager.prepare)
        config_store.subscribe(self._follow_config)

    def _program_parts(self, admin_socket: Path) -> ProgramParts:
        """The parts of the program that an upgrade uses."""
        return ProgramParts(
            fleet=self.data_plane.fleet,
            config_store=self.config_store,
            data_plane=self.data_plane,
            process_manager=self.process_manager,
            weight_operations=self.weight_operations,
            launcher=self.launcher,
            admin_socket=admin_socket,
            tree_seed=self._tree_seed,
            service_manager=self.service_manager,
            supervisors=lambda: self.supervisors,
            leave=self._handed_over.set,
            unlisted_sources=self.discovery.unlisted_sources,
            picker=lambda: self.picker,
        )

    def _build_signals(self) -> SignalHandler:
        incoming = self._incoming
        return SignalHandler(
            server_config=lambda: self.config_store.config.server,
            request_reload=self.reloader.request_reload,
            upgrades=self.upgrades,
            handed_over=self._handed_over,
            decline_takeover=incoming.decline if incoming is not None else None,
            service_manager=self.service_manager,
            process_manager=self.process_manager,
            picker=lambda: self.picker,
            counts=self.view.counts,
        )

    def _build_cluster(self, fleet: Fleet) -> ClusterMember:
        load = ProxyLoad(self.process_manager, self.view, self.config_store)
        figures = OwnFigures(fleet, self.instruments, self.view)
        return ClusterMember(
            fleet, self.config_store, (self.weight_operations, self.drains, self.prober),
            (load, figures), self._node_name,
        )  # fmt: skip

    def _build_services(self, proxy_id: str) -> Services:
        """The services of the admin API."""
        config_store = self.config_store
        picker = Picker(self.data_plane.services, self.process_manager.count)
        self.picker = PickerService(picker, lambda: config_store.config)
        if config_store.startup.picker:
            self.data_plane.listeners.relays = False
            self.picker.serve_envoy(self.data_plane.services, config_store)
        if self._incoming is not None:
            self.picker.take_over()
        return Services(
            workers=WorkerServices(
                fleet=self.data_plane.fleet,
                prober=self.prober,
                drains=self.drains,
                launcher=self.launcher,
                discovery=self.discovery,
                refresh_adapters=lambda: self.engine_pages.refresh(self.adapter_list),
            ),
            config_store=config_store,
            data_plane=self.view,
            weight_operations=self.weight_operations,
            keys=KeyServices(
                find_admin_key=lambda key: self.admin_keys.table.find(key),
                find_caller=lambda key: self.caller_keys.table.find(key),
                usage=self.process_manager.keys.usage,
                error=lambda: self.caller_keys.error,
            ),
            telemetry=TelemetryServices(
                instruments=self.instruments,
                kv_events=KvEventFacts(self.event_follower.counts, self.data_plane.kv_blocks),
                write_audit=self.logs["audit_log"].write,
            ),
            process=ProcessFacts(
                supervisors=lambda: [row for service in self.supervisors for row in service.rows()],
                leaving=lambda: self.signals.leaving,
                upgrade=self.upgrades.status,
                proxy_id=proxy_id,
            ),
            cluster=self.cluster,
            picker=self.picker,
        )

    def _build_engine_pages(self, fleet: Fleet) -> EnginePages:
        """All readers of engine state, except for voices."""
        clock = self.data_plane.loop.clock
        self.load_reader = EngineLoadReader(fleet, self._load_poll_secs, clock)
        self.event_follower = EventFollower(
            fleet,
            lambda url, changes: self.process_manager.take_kv_changes(url, changes),
            lambda: self.config_store.config.routing.cache_aware.max_index_blocks,
        )
        about = EngineRoles(fleet), EngineRanks(fleet), self.adapter_list, self.load_reader
        return EnginePages(fleet, (*about, self.event_follower.sources))

    def _build_supervisors(self) -> list[Supervisor]:
        """All supervisors, in the order of their start and of /status."""
        return [
            *(Supervisor(name, log.run) for name, log in self.logs.items()),
            self.admin_api,
            Supervisor("spans", self.instruments.spans.run),
            Supervisor("weights", self.weight_operations.run),
            Supervisor("prober", self.prober.run),
            Supervisor("launcher", self.launcher.run),
            Supervisor("outlier_ejector", self.outlier_removal.run, old_name="ejector"),
            Supervisor("drains", self.drains.run),
            Supervisor("discovery", self.discovery.run),
            Supervisor("engine_pages", self.engine_pages.run),
            Supervisor("kv_events", self.event_follower.run),
            Supervisor("voice_list", self.voice_list.run),
            Supervisor(
                "ticker",
                self.instruments.ticker.run,
                old_name="pulse",
            ),
            Supervisor("cluster", self.cluster.run),
            Supervisor("picker", self.picker.run),
            *(Supervisor(name, run) for name, run in self.picker.services),
            Supervisor("caller_keys", self.caller_keys.run),
            Supervisor("admin_keys", self.admin_keys.run),
            Supervisor("reloader", self.reloader.run),
            Supervisor("upgrade", self.upgrades.run),
        ]

    def _supervise_admin_api(self, services: Services, admin_socket: Path) -> Supervisor:
        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            # A QuartTrio can be served only once, so a restart creates a new one.
            await serve(self._app(services), admin_socket, task_status=task_status)

        return Supervisor("admin_api", run, old_name="front")

    def _app(self, services: Services) -> QuartTrio:
        """The admin API. Its responses include the counters of every process, and a change has
        reached every process before its response is sent."""
        app = create_app(services)

        async def before() -> None:
            self.process_manager.count()
            if request.method not in ("GET", "HEAD"):  # during an upgrade, changes must wait
                with trio.move_on_after(OPEN_SECS):
                    await self.upgrades.opened.wait()

        async def await_replicated(response: Response) -> Response:
            if request.method not in ("GET", "HEAD"):
                await self.process_manager.await_replicated()
            return response

        app.before_request(before)
        app.after_request(await_replicated)
        return app

    async def run(self) -> int:
        _log.info("proxy_started version=%s", __version__)
        collect_before_serving()
        self.process_manager.tree_seed = self._tree_seed
        self.process_manager.watch_started(self.event_follower.repeat)
        self.data_plane.fleet.watch_health(log_health)
        async with trio.open_nursery() as root:
            await root.start(self.watchdog.run)
            # The admin API starts before the listeners, so that no admin request fails.
            await root.start(self.data_plane.run)
            await root.start(self.process_manager.run)
            await root.start(self.admin_api.run)
            await root.start(self._supervisor_of("upgrade").run)
            self._take_activated_sockets()
            if self._incoming is not None:
                self._incoming.inherit(self.data_plane, self.process_manager)
            if self._incoming is not None or self.config_store.startup.launch:
                self.data_plane.listeners.held = True
            try:
                self.config_store.start()
            except ConfigError as error:
                root.cancel_scope.cancel()
                _print(str(error))
                return BAD_CONFIGURATION
            except OSError as error:
                root.cancel_scope.cancel()
                return self._cannot_listen(error)
            if self._is_activated:  # systemd keeps the files of its sockets
                self.data_plane.listeners.keep_files()
            root.start_soon(self.signals.run, root.cancel_scope)
            try:
                await self._start_services(root)
            except NotReady as error:
                root.cancel_scope.cancel()
                _print(str(error))
                return NOT_TAKEN_OVER
            exempt_objects()
            self.watchdog.end_startup()
            if self.data_plane.listeners.held and (status := await self._open_when_ready()):
                root.cancel_scope.cancel()
                return status
        await self.launcher.end_handed()
        _log.info("proxy_stopped")
        return 0

    async def _start_services(self, root: trio.Nursery) -> None:
        """Start the other services. Those that change state start after the takeover."""
        first = [self.admin_api, self._supervisor_of("upgrade")]
        if self._incoming is not None:
            if self.config_store.config.discover:
                first.append(self._supervisor_of("discovery"))
                await root.start(first[-1].run)
            envoy = [supervisor for supervisor in self.supervisors if supervisor.name == "envoy"]
            first += envoy
            await self._incoming.take_over(self.upgrades.parts, root, envoy)
            if not self._is_activated:
                self.data_plane.listeners.take_files()
            root.start_soon(self._incoming.follow_predecessor)
        for supervisor in self.supervisors:
            if supervisor not in first:
                await root.start(supervisor.run)
        self.upgrades.opened.set()
        self.service_manager.ready(taken_over=self._incoming is not None)
        root.start_soon(self.service_manager.run_watchdog)

    def _take_activated_sockets(self) -> None:
        """Take the sockets of systemd's socket activation."""
        socks = self.service_manager.take_sockets()
        listeners = self.data_plane.listeners
        for name in listeners.inherit(socks, self.config_store.config):
            _log.warning("activated_socket_unused address=%s reason=not_configured", name)
        self._is_activated = bool(socks)

    def _supervisor_of(self, name: str) -> Supervisor:
        return next(supervisor for supervisor in self.supervisors if supervisor.name == name)

    async def _open_when_ready(self) -> int:
        """Open the listeners once the replicas of the command line are ready. Returns 0, or the
        exit status if that fails."""
        launch = self.config_store.startup.launch
        longest = max(entry.ready_timeout_secs or math.inf for entry in launch)
        launcher = self.launcher
        failure = await wait_until_ready(
            launcher.status, launcher.wait_state_change, _print, longest
        )
        if failure:
            _print(f"giving up: {failure}")
            return NEVER_READY
        try:
            self.process_manager.open()
        except OSError as error:
            return self._cannot_listen(error)
        for url in self.data_plane.listeners.urls():
            _print(f"serving on {url}")
        return 0

    def _cannot_listen(self, error: OSError) -> int:
        server = self.config_store.config.server
        where = error.filename or f"{server.host}:{server.port}"
        _log.error("listen_failed address=%s error=%s", where, error.strerror or error)
        return CANNOT_LISTEN

    def _follow_config(self, old: Config, new: Config) -> None:
        server = new.server
        configure(server.log_level, server.log_format)
        for name, target in _log_targets(new).items():
            self.logs[name].retarget(target)
        access_log, route_log = self.logs["access_log"], self.logs["route_log"]
        self.data_plane.recorders.access_log = access_log if access_log.on else None
        self.data_plane.recorders.route_log = route_log if route_log.on else None
        endpoint = new.observe.otlp_endpoint
        self.instruments.spans.retarget(endpoint)
        self.data_plane.recorders.spans = self.instruments.spans if endpoint else None
        self.data_plane.recorders.meters = self.instruments.metrics if server.metrics else None
        if new.routing.load_poll_secs != old.routing.load_poll_secs:
            self.engine_pages.restart(self.load_reader)
        self.event_follower.settings_changed()

    def _node_name(self) -> str:
        """Host and port, the default node name in a cluster."""
        port = self.config_store.config.server.port
        for address in self.data_plane.addresses():
            port = int(address.rpartition(":")[2]) if address[-1:].isdecimal() else port
            break
        return f"{socket.gethostname()}:{port}"

    def _load_poll_secs(self) -> float:
        return self.config_store.config.routing.load_poll_secs

    def _trace_operation(self, operation: Operation, response: AdminResponse, secs: float) -> None:
        span = encode_operation_span(operation, response, secs, time.time_ns())
        if span is not None:
            self.instruments.spans.write(span)
