"""Changes of one worker at a time, as `omni-proxy workers` and `top` ask for them.

Invariant: a worker is found before anything is asked of it, and only where exactly one is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from omni_proxy.cli.client.admin_client import AdminClient, AdminReply, JsonObject
from omni_proxy.cli.screen.text_table import printable


class ChangeRefused(Exception):
    """The proxy, or the fleet as it is, says no; the text tells why."""


def fetch_workers(proxy: AdminClient, model: str | None = None) -> list[JsonObject]:
    """The fleet as GET /workers has it. Raises ChangeRefused, CannotAsk."""
    answer = require_accepted(proxy.get("/workers", {"model": model} if model else None))
    found = answer.told.get("workers")
    if not isinstance(found, list):
        raise ChangeRefused(f"{proxy.place.url} told no workers")
    return found


def require_accepted(answer: AdminReply) -> AdminReply:
    """Raises ChangeRefused."""
    if answer.refusal:
        raise ChangeRefused(printable(answer.refusal))
    return answer


def find_worker(fleet: Sequence[JsonObject], named: str) -> JsonObject:
    """The worker that is meant by its URL, its id, its HOST:PORT or a part of these.

    Raises ChangeRefused where that is nobody, or more than one.
    """
    names = [
        (record, [str(record.get(k)).lower() for k in ("url", "id", "display_id")])
        for record in fleet
    ]
    bare = named.rstrip("/").lower()  # in any spelling that may be added
    exact = [record for record, known in names if bare in known]
    found = exact or [record for record, known in names if any(bare in name for name in known)]
    if len(found) == 1:
        return found[0]
    urls = [printable(record.get("url")) for record in found or fleet]
    shown = ", ".join(urls[:6]) + (f" and {len(urls) - 6} more" if len(urls) > 6 else "")
    if found:
        raise ChangeRefused(f"{named} is a part of {len(found)} workers: {shown}")
    raise ChangeRefused(f"no worker is called {named}; there are: {shown or 'none at all'}")


def worker_path(worker_id: str) -> str:
    # An id is an encoded URL: encoded once more it is one segment of a path.
    return f"/workers/{quote(worker_id, safe='')}"


def change_worker(
    proxy: AdminClient, name: str, worker_id: str, timeout_secs: float | None = None
) -> JsonObject:
    """`disable`, `enable`, `revive`, `drain`, `remove` or `remove, drained`; the proxy's answer.

    Raises ChangeRefused, CannotAsk.
    """
    path = worker_path(worker_id)
    if name == "drain":
        body = {} if timeout_secs is None else {"timeout_secs": timeout_secs}
        return require_accepted(proxy.send("POST", f"{path}/drain", body)).told
    if name.startswith("remove"):
        query = {"drain": "true"} if name != "remove" else {}
        if query and timeout_secs is not None:
            query["timeout_secs"] = str(timeout_secs)
        return require_accepted(proxy.send("DELETE", path, query=query)).told
    body_of: dict[str, dict[str, Any]] = {
        "disable": {"disabled": True},
        "enable": {"disabled": False},
        "revive": {"is_dead": False},
    }
    return require_accepted(proxy.send("PUT", path, body_of[name])).told
