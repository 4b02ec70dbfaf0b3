"""Origins, hosts and ports: parsing, to refuse requests of pages of other origins.

Invariant: a text that can't be parsed equals no valid origin, and is no local name. Pure. Used by
the proxy and by the replica.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from werkzeug.datastructures import Headers

MAX_PORT: Final = 65535
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
Origin = tuple[str, str, int | None]  # scheme, host, port
NO_ORIGIN: Final[Origin] = ("", "", None)
_OWN_SITES: Final = ("none", "same-origin")
_BROWSER_FIELDS: Final = ("Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Dest", "Sec-Fetch-User")
_PAGE_MODES: Final = ("navigate", "no-cors", "same-origin", "websocket")


def hostname_of(host: str) -> str:
    """The name in a Host field: lower case, without port, final dot and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def is_local_name(name: str) -> bool:
    """Whether it is an IP address or localhost, which DNS rebinding can't redirect."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host, without brackets, is this machine's own: such traffic leaves no machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_origin(text: str) -> Origin:
    """The origin of an Origin, Referer or URL; NO_ORIGIN if it has none (`null`)."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return NO_ORIGIN
    if not parts.hostname:
        return NO_ORIGIN
    return parts.scheme, parts.hostname, port or DEFAULT_PORTS.get(parts.scheme)


def is_from_foreign_page(headers: Headers, own: Origin) -> bool:
    """Whether a request's headers name a page of an origin other than `own`, the server's."""
    if any(site not in _OWN_SITES for site in headers.getlist("Sec-Fetch-Site")):
        return True
    # Browsers that send no Origin with a form's POST send at least Referer.
    origins = headers.getlist("Origin") or headers.getlist("Referer")
    return any(own == NO_ORIGIN or parse_origin(origin) != own for origin in origins)


def shows_browser(headers: Headers) -> bool:
    """Whether a request's headers have any sign of a browser."""
    return (
        any(name in headers for name in _BROWSER_FIELDS)
        # An image request over plain HTTP to another machine has no other sign.
        or headers.get("User-Agent", "").startswith("Mozilla/")
        # fetch() outside browsers (Node) sends "cors" and none of the other headers.
        or headers.get("Sec-Fetch-Mode") in _PAGE_MODES
    )
