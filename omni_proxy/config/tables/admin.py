"""The table `[admin]`: the admin API, its listeners and its keys. Values only."""

from typing import Literal, TypeAlias

from msgspec import Struct

from omni_proxy.config.fields import (
    Duration,
    HostName,
    Listen,
    LogTarget,
    Size,
)
from omni_proxy.config.tables.keys import KeySource

AdminRole: TypeAlias = Literal["read", "operate", "weights", "all"]


class AdminKey(KeySource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further admin key, with a role. If there is one, control routes need a key."""

    # What it permits: `read` all reads; `operate` also changes of workers and reloads; `weights`
    # also weight updates and pauses; `all` everything.
    role: AdminRole = "read"


class AdminConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Largest body of a control request, in bytes; a larger one gets 413.
    max_body_bytes: Size = 64 * 1024 * 1024
    # true: /metrics needs no key.
    open_metrics: bool = False
    # If set, changes need it as a bearer token; it permits everything. If it is empty and there are
    # no [[admin.keys]], [server] api_key is used instead.
    api_key: str = ""
    # "host:port" or "unix:PATH": control routes are served only there.
    listen: Listen = ""
    # "host:port" or "unix:PATH": serves GET /metrics without a key, and nothing else.
    metrics_listen: Listen = ""
    # false: the admin listener requires no key.
    listen_key: bool = True
    # Host names, besides IP addresses and localhost, under which control routes without a key are
    # served: any other name may be an attacker's that resolves to this address (DNS rebinding).
    allowed_hosts: tuple[HostName, ...] = ()
    # `off`, `-` for stdout, or a path: one JSON line for each call that changes something, refused
    # calls included.
    audit_log: LogTarget = "off"
    # Weight updates run one at a time: the next one waits this long, then gets 503.
    lock_timeout_secs: Duration = 300.0
    # Timeout of a control call at one worker.
    worker_timeout_secs: Duration = 600.0
    keys: tuple[AdminKey, ...] = ()
