"""All that the running program is watched with, as one value to hand around."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_proxy.fleet.registry import Fleet
from omni_proxy.observe.lines import LineLog
from omni_proxy.observe.metrics import Meters
from omni_proxy.observe.pulse import Pulse
from omni_proxy.observe.recent import Recent
from omni_proxy.observe.silence import Silences


class Instruments:
    """`load` tells how many requests are in flight, and how many wait."""

    def __init__(
        self, fleet: Fleet, load: Callable[[], tuple[int, int]], logs: Mapping[str, LineLog]
    ) -> None:
        self.recent = Recent()
        self.meters = Meters(fleet, self.recent)
        self.silences = Silences(fleet, self.meters, self.recent)
        self.pulse = Pulse(self._beat)
        self.logs = logs
        self._load = load

    def _beat(self, at: float) -> None:
        self.recent.tick(at, *self._load())
        self.silences.tick(at)
