"""An admin API over a real fleet and real overlays; store, prober and data plane are fakes."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import trio

from omni_proxy.admin_api.app import create_app
from omni_proxy.admin_api.services import (
    KeyServices,
    ProcessFacts,
    Services,
    TelemetryServices,
    WorkerServices,
)
from omni_proxy.admin_ops.abort_requests import AbortFindings
from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import desired_workers
from omni_proxy.config.schema import AdminConfig, Config, RoutingConfig, WorkerEntry
from omni_proxy.config.state import SavedState, with_saved_keys
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.affinity_key import affinity_keys_of
from omni_proxy.routing.pinning import own_response_owners
from omni_proxy.routing.policies import build_policy
from omni_proxy.runtime_config.membership_lock import MembershipLock
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.shared.watchdog import Watchdog
from omni_proxy.telemetry.instruments import Instruments
from omni_proxy.weight_sync.state_journal import JournalFile
from omni_proxy.weight_sync.weight_operations import WeightOperations
from tests.idle import wait_until_idle

NOW = datetime(2026, 11, 21, 5, 44, 28, tzinfo=UTC)
A, B = "http://127.0.0.1:8011", "http://127.0.0.1:8012"  # workers of the fixture `api`
C = "http://127.0.0.1:8013"  # not one of its workers
ID_A = quote(A, safe="")
NO_FOLDER = Path(tempfile.gettempdir(), "omni-proxy-tests", "there-is-no-such-folder")

NO_FLAGS = Startup(config_path=None, overrides={}, flag_urls=(), admin_key="")

# A request's scope as the server passes it.
SCOPE = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
    "scheme": "http", "path": "/feed", "raw_path": b"/feed", "query_string": b"", "root_path": "",
    "headers": [(b"host", b"proxy")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    "extensions": {},
}  # fmt: skip


@dataclass
class Outcome:
    outcome: str
    revision: int
    diff: dict = field(default_factory=dict)
    error: Exception | None = None


class FakeConfigStore:
    """Applies edits to a fleet like the configuration store, in memory."""

    def __init__(self, fleet, config, startup=None):
        self.fleet, self.config, self.state = fleet, config, SavedState()
        self.startup = startup or NO_FLAGS
        self.revision, self.last_reload = 1, {"outcome": "applied"}
        self.reloads = Counter()
        self.file = self.state_file = None
        self.state_error = ""
        self.next_reload = Outcome("unchanged", 1)
        self.operation_lock = trio.Lock()
        self.membership_lock = MembershipLock()
        self.predecessor = None
        self.apply()

    def apply(self):
        self.fleet.apply(desired_workers(self.config, (), self.state), NOW)

    async def change(self, edit, if_match=None, *, at_once=False):
        if if_match is not None and if_match.strip('"') != str(self.revision):
            return Outcome("precondition_failed", self.revision)
        state = edit(self.state, self.config)
        if state == self.state:
            return Outcome("unchanged", self.revision)
        self.state = state
        self.config = with_saved_keys(self.config, state)
        self.revision += 1
        self.apply()
        return Outcome("applied", self.revision)

    async def reload(self, source, if_match=None):
        if if_match is not None and if_match.strip('"') != str(self.revision):
            return Outcome("precondition_failed", self.revision)
        return self.next_reload

    async def wait_predecessor_gone(self):
        """Return at once: there is no predecessor."""

    async def release_membership(self):
        self.membership_lock.release()

    def subscribe(self, callback):
        pass


class FakeProber:
    def __init__(self, fleet):
        self.fleet, self.probed = fleet, []

    async def probe_once(self, worker):
        self.probed.append(worker.url)
        epoch = worker.health.epoch
        self.fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=epoch)


class FakeDataPlane:
    def __init__(self):
        self.policy = build_policy(RoutingConfig(), lambda _: 0, 0.0)
        self.pool_policies = PoolPolicies(RoutingConfig(), lambda _: 0, lambda: 0.0)
        self.pools_reported = {}
        self.needs_affinity_key = True  # for any policy, since tests change the policy
        self.affinity_keys = affinity_keys_of(Config())
        self.draining = False
        self.voices = VoiceRegistry()
        self.process_rows = []
        self.sessions = {}  # URLs of workers by key
        self.finished = []
        self.watched = Watchdog()

        self.response_owners = own_response_owners()
        self.aliases = None
        self.target_checks = None  # of the targets of aliases
        self.found = AbortFindings()  # what an abort finds
        self.aborted = []

    async def abort(self, target):
        self.aborted.append(target)
        return self.found

    def status(self):
        return {"connections": 0}

    def counts(self):
        return {"accepted": 0, "connections": 0, "ended": {}, "failures": 0}

    def admission(self):
        return {"inflight": 0, "max_inflight": 0, "peak_inflight": 0, "rejected_total": 0}

    def pool_stats(self):
        return self.pools_reported

    def watchdog(self):
        return self.watched.status()

    def rows(self):
        return self.process_rows

    def finish_session(self, key):
        self.finished.append(key)
        return key in self.sessions

    def session_count(self, worker):
        return list(self.sessions.values()).count(worker.url)

    def served_at(self):
        return ("http://127.0.0.1:30000", "http://127.0.0.1:30001")

    def addresses(self):
        return ["http://127.0.0.1:30000"]


class ApiFixture(SimpleNamespace):
    """An admin API's app and the services behind it."""

    def client(self):
        return self.app.test_client()

    def worker(self, url=A):
        worker = self.fleet.find(url)
        assert worker is not None
        return worker

    async def settle(self):
        """Wait until the weight label of every worker is read, as after its start."""
        with trio.fail_after(30):
            for worker in self.fleet.workers:
                self.fleet.cache_cleared(worker)
            await wait_until_idle()

    def healthy(self, *urls):
        for url in urls:
            worker = self.worker(url)
            for _ in range(self.fleet.thresholds.rise):
                self.fleet.observe_probe(
                    worker, status=200, error=None, at=NOW, epoch=worker.health.epoch
                )


def entry(url, **fields):
    return WorkerEntry(url=url, capabilities=fields.pop("capabilities", CAPABILITIES), **fields)


def build_api(*entries, key="", folder=NO_FOLDER, startup=None, services=None, **tables):
    """If its `operations` run, they need a `folder` to write to; `startup` has fields of Startup,
    and `services` further fields of Services and of the records in it, or a function that returns
    them for the fleet."""
    fleet = Fleet()
    config = Config(workers=entries, **{"admin": AdminConfig(api_key=key), **tables})
    config_store = FakeConfigStore(fleet, config, replace(NO_FLAGS, **(startup or {})))
    api = ApiFixture(
        fleet=fleet,
        config_store=config_store,
        operations=WeightOperations(fleet, config_store, JournalFile(folder)),
        prober=FakeProber(fleet),
        data_plane=FakeDataPlane(),
        drains=WorkerDrains(fleet, config_store),
        instruments=Instruments(fleet, lambda: (0, 0), {}),
        leaving=False,
    )
    further = dict(services(fleet) if callable(services) else services or {})

    def filled(record, **values):
        names = {each.name for each in fields(record)} & further.keys()
        return record(**values, **{name: further.pop(name) for name in names})

    api.services = filled(
        Services,
        workers=filled(WorkerServices, fleet=fleet, prober=api.prober, drains=api.drains),
        config_store=api.config_store,
        data_plane=api.data_plane,
        weight_operations=api.operations,
        keys=filled(KeyServices),
        telemetry=filled(TelemetryServices, instruments=api.instruments),
        process=filled(
            ProcessFacts,
            supervisors=lambda: [{"name": "data_plane", "state": "running"}],
            leaving=lambda: api.leaving,
        ),
    )
    assert further == {}
    api.app = create_app(api.services)
    return api


async def call(api, method, path, body=None, **headers):
    """Status, JSON and header fields of the response. `body`: bytes to send, or a JSON value."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    response = await api.client().open(path, method=method, data=data, headers=headers)
    return response.status_code, await response.get_json(), response.headers


async def message(api, method, path, body=None, **headers):
    """Status and message of an error."""
    status, content, _ = await call(api, method, path, body, **headers)
    return status, content["error"]["message"]
