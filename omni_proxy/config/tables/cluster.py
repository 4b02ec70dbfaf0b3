"""The table `[cluster]`: several proxies over one fleet, and the store that they share.

Invariant: the URL may hold a password, so no error repeats it, and `hide_password` is what is
shown. Values only: `cluster_member.store_connection` reads the environment and the file.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Meta, Struct

from omni_proxy.config.api_keys import KeyVariable
from omni_proxy.config.problem import Path

DEFAULT_PORT: Final = 6379
MAX_DATABASE: Final = 2**31 - 1
_NAME: Final = re.compile(r"[A-Za-z0-9_.:@/-]{1,64}")
_PASSWORD: Final = re.compile(r"(?<=//)([^@/]*?):[^@]*@")
_FORM: Final = 'write it as "redis://host:6379/0", or with rediss:// for TLS'


class StoreAddress(NamedTuple):
    """`user` "" is the store's default user, `password` "" is none."""

    host: str
    port: int
    tls: bool
    user: str
    password: str
    database: int


def store_address(url: str) -> StoreAddress:
    """Raises ValueError(reason, hint), without the URL: it may hold a password."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ValueError("is no URL of a store", _FORM) from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("is no URL of a store", _FORM)
    if parts.query or parts.fragment:
        raise ValueError("has a query, which does nothing", _FORM)
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
        raise ValueError("names no number of a database behind its port", _FORM)
    return int(text)


def hide_password(url: str) -> str:
    return _PASSWORD.sub(r"\1:***@", url)


def read_store_url(value: object) -> object:
    """Empty is none."""
    if isinstance(value, str) and value:
        store_address(value)
        return value.strip()
    return value


def read_cluster_name(value: object) -> object:
    """It stands in keys of the store, log lines and metric labels: no spaces, no quotes."""
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError("takes 1 to 64 letters, digits and _ . : @ / -")
    return value


def read_node_name(value: object) -> object:
    """Empty for a name that is made."""
    return read_cluster_name(value) if value else value


StoreUrl = Annotated[str, Meta(extra={"read": read_store_url})]
ClusterName = Annotated[str, Meta(min_length=1, extra={"read": read_cluster_name})]
NodeName = Annotated[str, Meta(extra={"read": read_node_name})]
PublishInterval = Annotated[float, Meta(ge=0.005, le=10)]
LeaseDuration = Annotated[float, Meta(ge=0.5, le=3600)]
Shared = Literal["in_flight", "health", "prefixes", "weights", "workers", "sessions"]
SHARED: Final[tuple[Shared, ...]] = get_args(Shared)


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several proxies over one fleet, which share their state in a Valkey or Redis."""

    # "redis://[user:password@]host:6379/0", or rediss:// for TLS; empty, without url_env: this
    # proxy is alone.
    url: StoreUrl = ""
    # Environment variable with that URL, in the place of `url`.
    url_env: KeyVariable = ""
    # File with the password, read again at each connection; it is stronger than that of the URL.
    password_file: str = ""
    # Of the cluster: its proxies have the same one. Every key in the store begins with it.
    name: ClusterName = "omni"
    # Of this proxy, in the status of the others; empty: host and port.
    node: NodeName = ""
    # What is shared.
    share: tuple[Shared, ...] = SHARED
    # How often own counts are published, at most.
    publish_secs: PublishInterval = 0.05
    # A proxy that is silent for so long is gone: its counts no longer hold.
    lease_secs: LeaseDuration = 5.0
    # While the store can't be reached: go on with what is known (alone), or /ready is 503 (refuse).
    on_loss: Literal["alone", "refuse"] = "alone"

    @property
    def enabled(self) -> bool:
        return bool(self.url or self.url_env)


def cluster_findings(table: Mapping[str, Any]) -> Iterator[tuple[Path, str, str]]:
    """Rules between its keys. For `validate.check_rules`."""
    default = ClusterConfig()
    if table.get("url") and table.get("url_env"):
        yield ("cluster", "url_env"), "stands beside url", "drop one of them"
    if table.get("password_file") and not (table.get("url") or table.get("url_env")):
        yield ("cluster", "password_file"), "needs url or url_env, too", ""
    publish = table.get("publish_secs", default.publish_secs)
    lease = table.get("lease_secs", default.lease_secs)
    if lease < 4 * publish:
        reason = f"must be at least four times publish_secs, which is {publish:g}"
        yield ("cluster", "lease_secs"), reason, ""
