"""The table `[cluster]`: several proxies over one fleet, and the store that they share.

Invariant: the URL may contain a password, so errors never repeat it and displays use
`hide_password`. Values only: `cluster_member.store_connection` reads the environment and the file.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Meta, Struct

from omni_proxy.config.problem import Path
from omni_proxy.config.tables.keys import KeyVariable

DEFAULT_PORT: Final = 6379
MAX_DATABASE: Final = 2**31 - 1
_NAME: Final = re.compile(r"[A-Za-z0-9_.:@/-]{1,64}")
_PASSWORD: Final = re.compile(r"(?<=//)([^@/]*?):[^@]*@")
_FORM: Final = 'write it as "redis://host:6379/0", or with rediss:// for TLS'


class StoreAddress(NamedTuple):
    """`user` "": the store's default user; `password` "": no password."""

    host: str
    port: int
    tls: bool
    user: str
    password: str
    database: int


def store_address(url: str) -> StoreAddress:
    """Raises ValueError(reason, hint), without the URL because it may contain a password."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ValueError("is not a Redis URL", _FORM) from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("is not a Redis URL", _FORM)
    if parts.query or parts.fragment:
        raise ValueError("has a query or fragment, which has no effect", _FORM)
    return StoreAddress(
        host=parts.hostname,
        port=port,
        tls=parts.scheme == "rediss",
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=_database(parts),
    )


def _database(parts: SplitResult) -> int:
    text = parts.path.strip("/")
    if not text:
        return 0
    if not text.isdecimal() or int(text) > MAX_DATABASE:
        raise ValueError("has a path that is not a database number", _FORM)
    return int(text)


def hide_password(url: str) -> str:
    return _PASSWORD.sub(r"\1:***@", url)


def read_store_url(value: object) -> object:
    """Empty: no store."""
    if isinstance(value, str) and value:
        store_address(value)
        return value.strip()
    return value


def read_cluster_name(value: object) -> object:
    """The name is part of store keys, log lines and metric labels: no spaces, no quotes."""
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError("takes 1 to 64 letters, digits and _ . : @ / -")
    return value


def read_node_name(value: object) -> object:
    """Empty: generated from host and port."""
    return read_cluster_name(value) if value else value


StoreUrl = Annotated[str, Meta(extra={"read": read_store_url})]
ClusterName = Annotated[str, Meta(min_length=1, extra={"read": read_cluster_name})]
NodeName = Annotated[str, Meta(extra={"read": read_node_name})]
PublishInterval = Annotated[float, Meta(ge=0.005, le=10)]
LeaseDuration = Annotated[float, Meta(ge=0.5, le=3600)]
Shared = Literal["in_flight", "health", "prefixes", "weights", "workers", "sessions"]
SHARED: Final[tuple[Shared, ...]] = get_args(Shared)


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several proxies over one fleet, which share state through a Valkey or Redis."""

    # "redis://[user:password@]host:6379/0", or rediss:// for TLS. Empty, and without url_env: this
    # proxy is in no cluster.
    url: StoreUrl = ""
    # Environment variable with that URL, instead of `url`.
    url_env: KeyVariable = ""
    # File with the password, read again at each connection; overrides the password of the URL.
    password_file: str = ""
    # Name of the cluster, the same for all of its proxies: the prefix of every key in the store.
    name: ClusterName = "omni"
    # Name of this proxy in the status of the others; empty: host and port.
    node: NodeName = ""
    # Kinds of state that are shared.
    share: tuple[Shared, ...] = SHARED
    # Shortest interval between two publications of this proxy's counts.
    publish_secs: PublishInterval = 0.05
    # A proxy that published nothing for this long has left: its counts are dropped.
    lease_secs: LeaseDuration = 5.0
    # While the store is unreachable: continue with the last known state, or fail /ready with 503.
    on_loss: Literal["alone", "refuse"] = "alone"

    @property
    def enabled(self) -> bool:
        return bool(self.url or self.url_env)


def cluster_findings(table: Mapping[str, Any]) -> Iterator[tuple[Path, str, str]]:
    """Rules between keys of the table. For `validate.check_rules`."""
    default = ClusterConfig()
    if table.get("url") and table.get("url_env"):
        yield ("cluster", "url_env"), "can't be combined with url", "drop one of them"
    if table.get("password_file") and not (table.get("url") or table.get("url_env")):
        yield ("cluster", "password_file"), "needs url or url_env, too", ""
    publish = table.get("publish_secs", default.publish_secs)
    lease = table.get("lease_secs", default.lease_secs)
    if lease < 4 * publish:
        reason = f"must be at least four times publish_secs, which is {publish:g}"
        yield ("cluster", "lease_secs"), reason, ""
