"""`[[discover]]`: sources of workers that FILE does not name, and their label selectors.

Invariants: an entry that `discover_findings` accepts is complete for its kind, and its bearer token
never crosses a network in clear text; a text that `parse_selector` accepts selects the same pods as
on an API server (Kubernetes, "Labels and Selectors": `=`, `==`, `!=`, `in`, `notin`, `KEY` and
`!KEY`). Values only; `discovery_watch` queries the sources. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from omni_proxy.config.fields import CAPABILITIES, Capabilities, Interval, Name, Port, read_listen
from omni_proxy.config.problem import Path, format_path, to_toml_literal
from omni_proxy.config.url import normalize_url
from omni_proxy.shared.origins import is_loopback

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE: Final = rf"(?:{_NAME})?"
_EQUAL: Final = re.compile(rf"({_KEY})\s*(=|==|!=)\s*({_VALUE})")
_IN_SET: Final = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EXISTS: Final = re.compile(rf"(!?)\s*({_KEY})")
_LABEL_KEY: Final = re.compile(_KEY)
_LABEL_VALUE: Final = re.compile(_VALUE)
_COMMA: Final = re.compile(r",(?![^()]*\))")  # not inside the parentheses of a set

Operator: TypeAlias = Literal["in", "notin", "exists", "absent"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One term of a selector; labels have to match all of its terms."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "in":
                return labels.get(self.key) in self.values
            case "notin":  # matches if the label is missing, too
                return labels.get(self.key) not in self.values
            case "exists":
                return self.key in labels
            case "absent":
                return self.key not in labels


Selector: TypeAlias = tuple[Requirement, ...]


def parse_selector(text: str) -> Selector:
    """The empty selector matches everything. Raises ValueError with a reason."""
    if not text.strip():
        return ()
    return tuple(_requirement(term.strip()) for term in _COMMA.split(text))


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    return all(requirement.matches(labels) for requirement in selector)


def is_label_key(text: str) -> bool:
    return _LABEL_KEY.fullmatch(text) is not None


def _requirement(term: str) -> Requirement:
    if match := _EQUAL.fullmatch(term):
        operator: Operator = "notin" if match[2] == "!=" else "in"
        return Requirement(match[1], operator, frozenset((match[3],)))
    if match := _IN_SET.fullmatch(term):
        values = [value.strip() for value in match[3].split(",")]
        if all(map(_LABEL_VALUE.fullmatch, values)):
            return Requirement(match[1], "in" if match[2] == "in" else "notin", frozenset(values))
    if match := _EXISTS.fullmatch(term):
        return Requirement(match[2], "absent" if match[1] else "exists")
    raise ValueError(
        f"{to_toml_literal(term)} is not a term of a label selector",
        'write "app=sglang", "tier in (a, b)", "app!=x" or "!draft", joined by commas',
    )


MAX_DNS_NAME: Final = 253
SRV_MARK: Final = "_"  # names of SRV records begin with it (RFC 2782), host names never do


def read_selector(value: object) -> object:
    if isinstance(value, str):
        parse_selector(value)
    return value


def read_label(value: object) -> object:
    """The key of a label, or empty."""
    if isinstance(value, str) and value and not is_label_key(value):
        raise ValueError(f'"{value}" is not a label key; "app.kubernetes.io/name" is one')
    return value


def read_api_server(value: object) -> object:
    """A base URL, normalized; empty: the cluster that the proxy runs in."""
    if not isinstance(value, str) or not value:
        return value
    return normalize_url(value, allow_unix=False)


def read_dns_name(value: object) -> object:
    if not isinstance(value, str) or not value:
        return value
    labels = value.rstrip(".").split(".")
    printable = value.isascii() and value.isprintable() and not set(value) & set(" /:@[]")
    if not printable or len(value) > MAX_DNS_NAME or not all(0 < len(e) < 64 for e in labels):
        raise ValueError(f'"{value}" is not a DNS name; write it without scheme and port')
    return value


def read_dns_server(value: object) -> object:
    """`host:port`; empty: the server in resolv.conf."""
    if isinstance(value, str) and value[:5].lower() == "unix:":
        raise ValueError(f'"{value}" is not "host:port"')
    return read_listen(value)


LabelSelector = Annotated[str, Meta(extra={"read": read_selector})]
LabelKey = Annotated[str, Meta(extra={"read": read_label})]
ApiServer = Annotated[str, Meta(extra={"read": read_api_server})]
DnsName = Annotated[str, Meta(extra={"read": read_dns_name})]
DnsServer = Annotated[str, Meta(extra={"read": read_dns_server})]
PodPort: TypeAlias = Port | Name


class DiscoverEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Discovery of workers: pods of Kubernetes, or addresses in DNS."""

    # Name of the source in logs, metrics and GET /status.
    name: Name = "pods"
    # Pods of Kubernetes, or addresses in DNS.
    kind: Literal["kubernetes", "dns"] = "kubernetes"
    # Namespace of the pods; empty: the proxy's own; "*": all.
    namespace: str = ""
    # Label selector of the pods, as for kubectl.
    selector: LabelSelector = "app=sglang"
    # Port of each worker: a number, or the name of a port of the pod; the pod's annotation
    # omni-proxy.dev/port overrides it.
    port: PodPort = 30000
    # Empty: as the worker's /server_info reports. role_label overrides it.
    role: Literal["", "regular", "prefill", "decode"] = ""
    # Pod label that has the role.
    role_label: LabelKey = ""
    # Empty: as for a worker. model_label overrides it.
    model: str = ""
    # Pod label that has the model.
    model_label: LabelKey = ""
    # Protocol of KV transfer, as for a worker.
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    # URL of the API server; empty: the cluster's own, with the pod's service account.
    api_server: ApiServer = ""
    # File with the bearer token for the API server; read again for each request.
    token_file: str = ""
    # PEM file of CAs of an https api_server; empty: the system's.
    ca_file: str = ""
    # PEM files of a client certificate for the API server, and of its key.
    client_cert: str = ""
    client_key: str = ""
    # An SRV name, which begins with "_", or a host name with `port`.
    dns_name: DnsName = ""
    # "host:port"; empty: the servers in resolv.conf.
    dns_server: DnsServer = ""
    # DNS is queried again after this, or after the TTL if that is shorter.
    refresh_secs: Interval = 10.0
    capabilities: Capabilities = CAPABILITIES

    @property
    def is_srv(self) -> bool:
        return self.dns_name.startswith(SRV_MARK)


_OF_PODS: Final = (
    "namespace", "selector", "role_label", "model_label", "api_server", "token_file", "ca_file",
    "client_cert", "client_key",
)  # fmt: skip
_OF_DNS: Final = ("dns_name", "dns_server")
_DEFAULTS: Final = DiscoverEntry()
Finding: TypeAlias = tuple[Path, str, str]


def discover_findings(entries: Sequence[Mapping[str, Any]], path: Path) -> Iterator[Finding]:
    """Rules between the keys of the tables at `path`. For `validate.check_rules`."""
    first: dict[str, Path] = {}
    for index, entry in enumerate(entries):
        place = (*path, index)
        name = entry.get("name", _DEFAULTS.name)
        if name in first:
            hint = f"{format_path(first[name])} has it already"
            yield (*place, "name"), f"duplicate name {name}", hint
        first.setdefault(name, (*place, "name"))
        of_dns = entry.get("kind") == "dns"
        for key in _OF_PODS if of_dns else _OF_DNS:
            if entry.get(key, getattr(_DEFAULTS, key)) != getattr(_DEFAULTS, key):
                kind = "kubernetes" if of_dns else "dns"
                yield (*place, key), f'is for kind = "{kind}" only', "drop it"
        yield from _dns_findings(entry, place) if of_dns else _pod_findings(entry, place)


def _dns_findings(entry: Mapping[str, Any], place: Path) -> Iterator[Finding]:
    name = entry.get("dns_name", "")
    if not name:
        yield (*place, "dns_name"), "is missing", "name SRV records or a host"
    elif not name.startswith(SRV_MARK) and isinstance(entry.get("port"), str):
        yield (*place, "port"), "must be a number: only pods name their ports", ""


def _pod_findings(entry: Mapping[str, Any], place: Path) -> Iterator[Finding]:
    server = entry.get("api_server", "")
    if server and not entry.get("namespace"):
        reason = "is required with api_server: the default is known only inside the cluster"
        yield (*place, "namespace"), reason, 'name it, or "*" for all'
    for key, other in (("client_cert", "client_key"), ("client_key", "client_cert")):
        if entry.get(key) and not entry.get(other):
            yield (*place, key), f"needs {other}, too", ""
    if not server.startswith("http://"):
        return
    for key in ("ca_file", "client_cert"):
        if entry.get(key):
            yield (*place, key), "is for an https api_server only", "write its URL with https://"
    if entry.get("token_file") and not is_loopback(urlsplit(server).hostname or ""):
        reason = "would be sent in clear text: http:// is allowed for loopback addresses only"
        yield (*place, "token_file"), reason, "write the URL of api_server with https://"
