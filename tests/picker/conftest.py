from types import SimpleNamespace

import pytest

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.picker.picker import Picker, read_selection
from tests.dataplane.manual_clock import ManualClock
from tests.fleet.entries import entry, fleet_of


class PickerFixture(SimpleNamespace):
    """A picker with healthy workers and a manual clock."""

    def exchange(self, body=b'{"messages": []}'):
        return self.picker.inspect_small(read_selection(body).request)

    def acquire(self, body=b'{"messages": []}', outside=()):
        exchange = self.exchange(body)
        return exchange, self.picker.acquire(exchange, outside)

    @property
    def counts(self):
        return [worker.in_flight for worker in self.fleet.workers]


def picker_over(*entries, config="", clock=None):
    fleet, clock = fleet_of(*entries), clock or ManualClock()
    config = parse(config)
    dataplane = DataPlane(
        fleet, config, admin_socket="/nowhere", sources=Sources(lambda n: 0, clock)
    )
    published = []
    picker = Picker(dataplane.services, lambda: published.append(1))
    return PickerFixture(
        fleet=fleet, dataplane=dataplane, picker=picker, clock=clock, published=published,
        config=config,
    )  # fmt: skip


@pytest.fixture
async def fixture():
    return picker_over(entry("a"), entry("b"))
