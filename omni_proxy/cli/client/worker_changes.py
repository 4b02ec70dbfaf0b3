"""Changes of one worker at a time, for `omni-proxy workers` and `top`.

Invariant: a change is sent only if the given name matches exactly one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final
from urllib.parse import quote, urlsplit

from omni_proxy.cli.client.admin_client import AdminClient, AdminReply, JsonObject
from omni_proxy.cli.terminal_text import printable
from omni_proxy.shared.origins import DEFAULT_PORTS

EXIT_REFUSED: Final = 1  # exit status if the proxy refused a change


class WorkerAction(StrEnum):
    """The values are the names of the commands of `omni-proxy workers`."""

    DISABLE = "disable"
    ENABLE = "enable"
    REVIVE = "revive"
    DRAIN = "drain"
    REMOVE = "remove"


class ChangeRefused(Exception):
    """The proxy refused the change, or no worker matches; the text gives the reason."""


def fetch_workers(proxy: AdminClient, model: str | None = None) -> list[JsonObject]:
    """The workers of GET /workers. Raises ChangeRefused, AdminClientError."""
    reply = require_accepted(proxy.get("/workers", {"model": model} if model else None))
    workers = reply.body.get("workers")
    if not isinstance(workers, list):
        raise ChangeRefused(f"the reply of {proxy.target.url} lists no workers")
    return workers


def require_accepted(reply: AdminReply) -> AdminReply:
    """Raises ChangeRefused."""
    if reply.refusal:
        raise ChangeRefused(printable(reply.refusal))
    return reply


def find_worker(fleet: Sequence[JsonObject], given: str) -> JsonObject:
    """The worker with this URL, id or HOST:PORT, or the only one with this host or port.

    Raises ChangeRefused if no worker matches, or more than one.
    """
    wanted = given.rstrip("/").lower()  # as `workers add` accepts it
    exact = [record for record in fleet if wanted in _whole_names(record)]
    matches = exact or [record for record in fleet if wanted in _host_and_port(record)]
    if len(matches) == 1:
        return matches[0]
    urls = [printable(record.get("url")) for record in matches or fleet]
    listed = ", ".join(urls[:6]) + (f" and {len(urls) - 6} more" if len(urls) > 6 else "")
    if matches:
        raise ChangeRefused(f"{given} names {len(matches)} workers: {listed}")
    raise ChangeRefused(
        f"no worker is called {given} (its URL, host:port, host or port); "
        f"workers: {listed or 'none'}"
    )


def _whole_names(record: JsonObject) -> set[str]:
    names = {str(record.get(key)).lower() for key in ("url", "id", "display_id")}
    return names | {urlsplit(str(record.get("url"))).netloc.lower()}


def _host_and_port(record: JsonObject) -> set[str]:
    parts = urlsplit(str(record.get("url")))
    host, port = parts.hostname or "", parts.netloc.rpartition(":")[2]
    if not port.isdecimal():
        port = str(DEFAULT_PORTS.get(parts.scheme, ""))
    return {host, f"[{host}]", port} - {"", "[]"}


def worker_path(worker_id: str) -> str:
    # An id is an encoded URL: encoded once more it is one segment of a path.
    return f"/workers/{quote(worker_id, safe='')}"


def change_worker(
    proxy: AdminClient,
    action: WorkerAction,
    worker_id: str,
    *,
    drain: bool = False,
    timeout_secs: float | None = None,
) -> JsonObject:
    """Send one change and return the proxy's reply. `drain`: drain a worker before it is removed.
    `timeout_secs`: the time to drain it.

    Raises ChangeRefused, AdminClientError.
    """
    path = worker_path(worker_id)
    if action is WorkerAction.DRAIN:
        timeout = {} if timeout_secs is None else {"timeout_secs": timeout_secs}
        return require_accepted(proxy.send("POST", f"{path}/drain", timeout)).body
    if action is WorkerAction.REMOVE:
        query = {"drain": "true"} if drain else {}
        if drain and timeout_secs is not None:
            query["timeout_secs"] = str(timeout_secs)
        return require_accepted(proxy.send("DELETE", path, query=query)).body
    if action is WorkerAction.REVIVE:
        body = {"is_dead": False}
    else:
        body = {"disabled": action is WorkerAction.DISABLE}
    return require_accepted(proxy.send("PUT", path, body)).body
