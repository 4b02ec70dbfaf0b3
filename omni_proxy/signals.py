"""Signal handling: reload, upgrade, and the shutdown with its drain.

| signal | effect |
|---|---|
| SIGHUP | reloads the configuration |
| SIGUSR2 | starts an upgrade |
| SIGTERM, SIGINT | the first drains and ends the program, a second one aborts |
Invariant: a drain takes at most `drain_timeout_secs`, after `ready_off_secs` in which only the
readiness has changed. Must not change workers or configuration itself.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import trio

from omni_proxy.config.schema import ServerConfig
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.picker.service import PickerService
from omni_proxy.system.systemd import ServiceManager
from omni_proxy.upgrade.control_socket import UpgradeService

_log = logging.getLogger(__name__)

RELOAD, UPGRADE = signal.SIGHUP, signal.SIGUSR2


@dataclass
class SignalHandler:
    """`handed_over`: set when the new program of an upgrade serves. `decline_takeover`: in the new
    program, whether it can still leave the service to the old one; None without an upgrade.
    `leaving`: the program is about to end, so it is not ready any more."""

    server_config: Callable[[], ServerConfig]
    request_reload: Callable[[str], None]
    upgrades: UpgradeService
    handed_over: trio.Event
    decline_takeover: Callable[[], bool] | None
    service_manager: ServiceManager
    process_manager: ProcessManager
    picker: Callable[[], PickerService]
    counts: Callable[[], Mapping[str, object]]
    leaving: bool = field(default=False, init=False)

    async def run(self, root_scope: trio.CancelScope) -> None:
        """Handle signals until the program ends; `root_scope` is then cancelled."""
        numbers = RELOAD, UPGRADE, signal.SIGTERM, signal.SIGINT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave_after_upgrade, root_scope)
            with trio.open_signal_receiver(*numbers) as signals:
                async for number in signals:
                    if number == RELOAD:
                        self.request_reload("SIGHUP")
                    elif number == UPGRADE:
                        self.upgrades.request()
                    elif self.leaving:
                        _log.warning("shutdown_aborted signal=%s", signal.Signals(number).name)
                        root_scope.cancel()
                    else:
                        self.leaving = True
                        nursery.start_soon(self._shut_down, root_scope)

    async def _shut_down(self, root_scope: trio.CancelScope) -> None:
        server = self.server_config()
        if self.decline_takeover is not None and not self.decline_takeover():
            await self.upgrades.opened.wait()  # finish the takeover first
        self.service_manager.stopping()
        self.upgrades.outgoing.stop()
        if server.ready_off_secs:
            _log.info("shutdown_started ready_off=%gs", server.ready_off_secs)
            await trio.sleep(server.ready_off_secs)
        _log.info("drain_started timeout=%gs", server.drain_timeout_secs)
        self.process_manager.begin_drain()
        await self._end_when_drained(root_scope)

    async def _leave_after_upgrade(self, root_scope: trio.CancelScope) -> None:
        """When the new program serves, end with the last connection."""
        await self.handed_over.wait()
        self.leaving = True
        await self.upgrades.wait_reported()
        await self._end_when_drained(root_scope)

    async def _end_when_drained(self, root_scope: trio.CancelScope) -> None:
        with trio.move_on_after(self.server_config().drain_timeout_secs) as scope:
            self.picker().begin_drain()
            await self.process_manager.drained()
            await self.picker().drained()
        if scope.cancelled_caught:
            _log.warning("drain_timeout aborted_connections=%d", self.counts()["connections"])
        root_scope.cancel()
