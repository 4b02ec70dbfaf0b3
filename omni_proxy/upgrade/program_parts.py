"""The parts of a program that an upgrade uses, on either side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.launch.launcher import Launcher
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.picker.service import PickerService
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.supervisor import Supervisor
from omni_proxy.system.systemd import ServiceManager
from omni_proxy.weight_sync.weight_operations import WeightOperations


@dataclass(frozen=True, slots=True)
class ProgramParts:
    """`tree_seed`: seed of the hashes in prefix trees. `supervisors`: those of all services.

    `leave`: makes the program end after its last connection. `unlisted_sources`: discovery
    sources that have provided no list so far, with the reason.
    """

    fleet: Fleet
    config_store: ConfigStore
    data_plane: DataPlane
    process_manager: ProcessManager
    weight_operations: WeightOperations
    launcher: Launcher
    admin_socket: Path
    tree_seed: int
    service_manager: ServiceManager
    picker: Callable[[], PickerService]
    supervisors: Callable[[], list[Supervisor]]
    leave: Callable[[], None]
    unlisted_sources: Callable[[], list[str]]
