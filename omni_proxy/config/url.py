"""Worker URLs: normalization, and refusal of cloud metadata services.

A normalized URL is `scheme://host[:port]` in lower case or `unix:/path`; two workers are the same
if and only if their normalized URLs are equal. Names are not resolved here: code that connects must
check every resolved address with `refused_address`.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from omni_proxy.shared.origins import DEFAULT_PORTS, MAX_PORT

_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_NUMBER: Final = re.compile(r"0x[0-9a-f]*|[0-9]+")
_METADATA_NAMES: Final = frozenset(
    {
        "metadata",
        "metadata.google.internal",
        "metadata.goog",
        "instance-data",
        "instance-data.ec2.internal",
    }
)
_LINK_LOCAL: Final = (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fe80::/10"))
_METADATA: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "fd00:ec2::/32",  # AWS: metadata ::254, pod identity ::23
        "fd20:ce::254/128",  # Google
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle
    )
)
# IPv6 networks whose addresses embed an IPv4 address, and the bits it is shifted by: compatible
# (RFC 4291 2.5.5.1), mapped (2.5.5.2), translated (RFC 7915), NAT64 (RFC 6052), 6to4 (RFC 3056).
_EMBEDDING_NETWORKS: Final = tuple(
    (ipaddress.IPv6Network(network), shift)
    for network, shift in (
        ("::/96", 0),
        ("::ffff:0:0/96", 0),
        ("::ffff:0:0:0/96", 0),
        ("64:ff9b::/96", 0),
        ("2002::/16", 80),
    )
)
_NAT64_LOCAL: Final = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215
_TEREDO: Final = ipaddress.IPv6Network("2001::/32")  # RFC 4380
_ISATAP: Final = (0x00005EFE, 0x02005EFE)  # RFC 5214: the interface identifier's first half
_IPV4: Final = 0xFFFFFFFF
_MAX_UNIX_PATH_BYTES: Final = 107  # sun_path of Linux without its terminating NUL
_RANK_DIGITS: Final = 4


def normalize_url(text: str, *, allow_unix: bool) -> str:
    """Raises ValueError with a reason that can be shown to the user."""
    text = text.strip()
    if not text:
        raise ValueError("must not be empty")
    if text[:5].lower() == "unix:":
        return _unix_url(text[5:], allow_unix)
    # urlsplit silently drops tabs and newlines inside a URL.
    if any(c.isspace() or not c.isprintable() for c in text):
        raise ValueError("must not contain spaces or control characters")
    parts = _split(text)
    host = _normal_host(parts.hostname or "", bracketed="[" in parts.netloc)
    return f"{parts.scheme}://{host}{_port(parts)}"


def split_rank(text: str) -> tuple[str, int | None]:
    """The URL and its data-parallel rank, which other routers append: `http://HOST:PORT@3`.
    The rank is None if there is none."""
    url, separator, rank = text.strip().rpartition("@")
    if (
        separator
        and "://" in url
        and rank.isascii()
        and rank.isdecimal()
        and len(rank) <= _RANK_DIGITS
    ):
        return url, int(rank)
    return text, None


def worker_id(url: str) -> str:
    return quote(url, safe="")


def display_id(url: str) -> str:
    return url.partition("://")[2] or url


def dial_address(url: str) -> tuple[str, int] | str:
    """(host, port), or the path of a Unix socket. `url` is normalized."""
    if url.startswith("unix:"):
        return url[5:]
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]


def refused_address(ip: str) -> str | None:
    """The reason why no worker may have this address, or None if it is allowed.

    Text that is not an address is allowed.
    """
    try:
        address = ipaddress.ip_address(ip.strip("[]").partition("%")[0])
    except ValueError:
        dotted = _ipv4(ip.lower().rstrip("."))
        return None if dotted is None else _refused(dotted)
    return _refused(address)


def _refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if any(address in network for network in _LINK_LOCAL):
        return f"link-local address {address} is not allowed"
    if any(address in network for network in _METADATA):
        return f"cloud metadata address {address} is not allowed"
    if isinstance(address, ipaddress.IPv6Address):
        return next(filter(None, map(_refused, _embedded_ipv4(address))), None)
    return None


def _embedded_ipv4(address: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    """The IPv4 addresses embedded in this one, to which a network might deliver packets for it."""
    bits = int(address)
    embedded = [
        bits >> shift & _IPV4 for network, shift in _EMBEDDING_NETWORKS if address in network
    ]
    if address in _NAT64_LOCAL:
        embedded += _nat64(bits)
    if address in _TEREDO:
        embedded += [bits >> 64 & _IPV4, ~bits & _IPV4]  # the server, and the client, inverted
    if bits >> 32 & _IPV4 in _ISATAP:
        embedded.append(bits & _IPV4)
    return map(ipaddress.IPv4Address, embedded)


def _nat64(bits: int) -> list[int]:
    """The candidates of RFC 6052 2.2 for prefixes of 96, 64, 56 and 48 bits, as the length in use
    is unknown. Bits 64 to 71 are not part of the IPv4 address."""
    joined = (bits >> 64 & 0xFFFF) << 56 | bits & 0xFFFFFFFFFFFFFF  # from bit 48, without 64 to 71
    return [bits & _IPV4, bits >> 24 & _IPV4, joined >> 32 & _IPV4, joined >> 40 & _IPV4]


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(
            "host must be a name, an IPv4 address or an IPv6 address in brackets"
        ) from None
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError("scheme must be http or https, as in http://HOST:PORT")
    if "@" in parts.netloc:
        raise ValueError("must not contain user-info")
    if not parts.hostname:
        raise ValueError("must include a host")
    if parts.path not in {"", "/"}:
        raise ValueError("must be a base URL without a path")
    if parts.query or parts.fragment:
        raise ValueError("must not contain a query or fragment")
    return parts


def _port(parts: SplitResult) -> str:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"port out of range 1-{MAX_PORT}")
    return "" if port is None else f":{port}"


def _normal_host(host: str, *, bracketed: bool) -> str:
    host = host.lower()
    if bracketed:
        return f"[{_checked(_ipv6(host))}]"
    stripped = host.rstrip(".")
    if stripped in _METADATA_NAMES:
        raise ValueError(f"host {stripped} is a cloud metadata service and not allowed")
    if _NUMBER.fullmatch(stripped.rpartition(".")[2]):
        dotted = _ipv4(stripped)
        if dotted is None:
            raise ValueError(f"host {host} is not an IPv4 address")
        return _checked(dotted)
    if not _NAME.fullmatch(host):
        raise ValueError("host may contain only letters, digits, '.', '-' and '_'")
    return host


def _checked(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    reason = _refused(address)
    if reason:
        raise ValueError(reason)
    return str(address)


def _ipv6(host: str) -> ipaddress.IPv6Address:
    # Only link-local addresses have a zone, so the address is checked without it.
    try:
        return ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        raise ValueError(f"host [{host}] is not an IPv6 address") from None


def _ipv4(host: str) -> ipaddress.IPv4Address | None:
    """One to four numbers in decimal, hex or octal, as inet_aton(3) reads them."""
    labels = host.split(".")
    if len(labels) > 4 or not all(_NUMBER.fullmatch(label) for label in labels):
        return None
    try:
        *heads, last = [_number(label) for label in labels]
    except ValueError:
        return None
    if any(head > 255 for head in heads) or last >= 256 ** (4 - len(heads)):
        return None
    return ipaddress.IPv4Address(sum(head << 24 - 8 * i for i, head in enumerate(heads)) + last)


def _number(label: str) -> int:
    if label.startswith("0x"):
        return int(label[2:] or "0", 16)
    return int(label, 8 if label.startswith("0") else 10)


def _unix_url(path: str, allowed: bool) -> str:
    if not allowed:
        raise ValueError("unix: workers can be named in the configuration file only")
    if not path.startswith("/"):
        raise ValueError("unix: needs an absolute path, as in unix:/run/worker.sock")
    if "\0" in path or len(path.encode()) > _MAX_UNIX_PATH_BYTES:
        raise ValueError(f"socket path must be at most {_MAX_UNIX_PATH_BYTES} bytes, without NUL")
    return f"unix:{path}"
