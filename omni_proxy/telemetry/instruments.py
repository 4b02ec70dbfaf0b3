"""All that the running program is watched with, as one value to hand around."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_proxy.fleet.registry import Fleet
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from omni_proxy.telemetry.stall_detector import EngineStallDetector
from omni_proxy.telemetry.ticker import Ticker


class Instruments:
    """`load` tells how many requests are in flight, and how many wait."""

    def __init__(
        self, fleet: Fleet, load: Callable[[], tuple[int, int]], logs: Mapping[str, LineLog]
    ) -> None:
        self.recent = RecentWindow()
        self.meters = Metrics(fleet, self.recent)
        self.silences = EngineStallDetector(fleet, self.meters, self.recent)
        self.pulse = Ticker(self._beat)
        self.logs = logs
        self._load = load

    def _beat(self, at: float) -> None:
        self.recent.tick(at, *self._load())
        self.silences.tick(at)
