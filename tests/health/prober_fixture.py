"""A real fleet and a real prober over a fake configuration store."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.schema import Config, HealthConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.health.prober import Prober

NOW = datetime(2026, 11, 21, tzinfo=UTC)
URL = "http://127.0.0.1:8011"


def worker_spec(url):
    return WorkerSpec(
        url=url, model=None, capabilities=frozenset(CAPABILITIES), disabled=False, weight=1,
        max_inflight=0, origin="file",
    )  # fmt: skip


class ProberFixture(SimpleNamespace):
    def configure(self, **health):
        old, self.config_store.config = (
            self.config_store.config,
            Config(health=HealthConfig(**health)),
        )
        for callback in self.config_store.callbacks:
            callback(old, self.config_store.config)

    def add(self, *urls):
        self.urls.extend(urls)
        self.fleet.apply([worker_spec(url) for url in self.urls], NOW)
        return self.fleet.find(urls[-1])

    def remove(self, url):
        self.urls.remove(url)
        self.fleet.apply([worker_spec(known) for known in self.urls], NOW)


def build_prober_fixture():
    callbacks = []
    config_store = SimpleNamespace(config=Config(), callbacks=callbacks, subscribe=callbacks.append)
    fleet = Fleet()
    prober = Prober(fleet, config_store, jitter=lambda: 0.5)
    return ProberFixture(fleet=fleet, config_store=config_store, urls=[], prober=prober)
