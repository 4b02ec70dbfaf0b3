"""The configuration: all its tables. Each key with its type, its range and its default is in
`tables`, one module per group of tables.

Values only: `parse` validates; a struct that is built directly is not checked. Nothing here and in
`tables` may read the environment, the clock or a file. Comments above keys appear in
docs/configuration.md.
"""

from msgspec import Struct

from omni_proxy.config.tables.admin import AdminConfig, AdminKey, AdminRole
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.config.tables.picker import PickerConfig
from omni_proxy.config.tables.routing import (
    AliasTarget,
    CacheAwareConfig,
    ControlRouteEntry,
    DisaggregationConfig,
    ModelAlias,
    PrefixHashConfig,
    RouteEntry,
    RoutingConfig,
)
from omni_proxy.config.tables.server import ObserveConfig, ServerConfig, TimeoutsConfig
from omni_proxy.config.tables.weight_sync import WeightSyncConfig
from omni_proxy.config.tables.workers import HealthConfig, LaunchEntry, WorkerEntry

__all__ = [
    "AdminConfig",
    "AdminKey",
    "AdminRole",
    "AliasTarget",
    "CacheAwareConfig",
    "Config",
    "ControlRouteEntry",
    "DisaggregationConfig",
    "HealthConfig",
    "LaunchEntry",
    "ModelAlias",
    "ObserveConfig",
    "PrefixHashConfig",
    "RouteEntry",
    "RoutingConfig",
    "ServerConfig",
    "TimeoutsConfig",
    "WeightSyncConfig",
    "WorkerEntry",
]


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    routing: RoutingConfig = RoutingConfig()
    health: HealthConfig = HealthConfig()
    admin: AdminConfig = AdminConfig()
    observe: ObserveConfig = ObserveConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    picker: PickerConfig = PickerConfig()
    workers: tuple[WorkerEntry, ...] = ()
    launch: tuple[LaunchEntry, ...] = ()
    discover: tuple[DiscoverEntry, ...] = ()
    routes: tuple[RouteEntry, ...] = ()
    control_routes: tuple[ControlRouteEntry, ...] = ()
    keys: tuple[CallerKey, ...] = ()
