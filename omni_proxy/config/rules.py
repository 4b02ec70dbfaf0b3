"""Rules between keys: duplicate URLs, incomplete pairs, keys that contradict each other.

Works on the tables that `walk` returns: parts may be missing, and the others have the right types.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omni_proxy.config.problem import Path, format_path
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.config.walk import Finding

VOICE_CAPABILITIES = ("speech", "audio_input")


def check_rules(tables: Mapping[str, Any]) -> Iterator[Finding]:
    launch = tables.get("launch", [])
    yield from _incomplete_pairs(tables.get("server", {}))
    yield from _tls_without_effect(tables)
    yield from _failure_policy_without_store(tables.get("weight_sync", {}))
    for index, entry in enumerate(launch):
        yield from _launch_problems(entry, ("launch", index))
    yield from _duplicates(_launch_names(launch), "group name")
    yield from _duplicates(_worker_urls(tables.get("workers", []), launch), "worker URL")
    yield from _voice_owner_capabilities(tables)


def _voice_owner_capabilities(tables: Mapping[str, Any]) -> Iterator[Finding]:
    owner = tables.get("routing", {}).get("voice_owner")
    for entry in tables.get("workers", []):
        if owner and entry.get("url") == owner and "capabilities" in entry:
            missing = [name for name in VOICE_CAPABILITIES if name not in entry["capabilities"]]
            if missing:
                reason = f"{owner} lacks {' and '.join(missing)}, which keeping voices needs"
                yield ("routing", "voice_owner"), reason, "add that to its capabilities"


def _incomplete_pairs(server: Mapping[str, Any]) -> Iterator[Finding]:
    for given, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if server.get(given) and not server.get(other):
            yield ("server", given), f"needs {other} beside it", ""


def _tls_without_effect(tables: Mapping[str, Any]) -> Iterator[Finding]:
    """TLS keys without effect: their author would believe to be protected."""
    server = tables.get("server", {})
    if server.get("tls_cert") and server.get("host", "").startswith("unix:"):
        yield ("server", "tls_cert"), "a Unix socket speaks no TLS", "listen on a port"
    if server.get("tls_client_ca") and not server.get("tls_cert"):
        yield ("server", "tls_client_ca"), "needs tls_cert and tls_key beside it", ""
    for index, entry in enumerate(tables.get("workers", [])):
        path = ("workers", index)
        unverified = entry.get("tls_verify") is False
        chosen = "tls_ca" if entry.get("tls_ca") else "tls_verify" if unverified else ""
        if chosen and not entry.get("url", "https").startswith("https"):
            yield (*path, chosen), "is for https workers only", "write its url with https://"
        elif entry.get("tls_ca") and unverified:
            yield (*path, "tls_verify"), "is off, so tls_ca does nothing", "drop one of them"


def _failure_policy_without_store(sync: Mapping[str, Any]) -> Iterator[Finding]:
    policy = sync.get("on_failure", "quarantine")
    if policy != "quarantine" and sync.get("mode") not in ("receive", "both"):
        reason = f'"{policy}" needs versions that we keep'
        yield ("weight_sync", "on_failure"), reason, 'set weight_sync.mode to "receive" or "both"'


def _launch_problems(entry: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    if entry.get("command") and not entry["command"][0].strip():
        yield (*path, "command"), "names no program", ""
    for name in entry.get("env", {}):
        if not name or "=" in name:
            yield (*path, "env", name), "is no name of an environment variable", ""
    group = _group(entry)
    last = group.base_port + group.replicas - 1
    if last > 65535:
        yield (*path, "base_port"), f"the last replica would need port {last}", ""
    else:
        try:
            _ = group.urls
        except ValueError as error:
            yield (*path, "host"), str(error), ""


def _group(entry: Mapping[str, Any]) -> LaunchEntry:
    known = {key: entry[key] for key in ("host", "base_port", "replicas") if key in entry}
    return LaunchEntry(command=(), **known)


def _launch_names(launch: list[Mapping[str, Any]]) -> Iterator[tuple[Path, str]]:
    default = LaunchEntry(command=()).name
    for index, entry in enumerate(launch):
        yield ("launch", index, "name"), entry.get("name", default)


def _worker_urls(
    workers: list[Mapping[str, Any]], launch: list[Mapping[str, Any]]
) -> Iterator[tuple[Path, str]]:
    for index, entry in enumerate(workers):
        if "url" in entry:
            yield ("workers", index, "url"), entry["url"]
    for index, entry in enumerate(launch):
        path: Path = ("launch", index)
        if not any(_launch_problems(entry, path)):
            for url in _group(entry).urls:
                yield (*path, "base_port"), url


def _duplicates(named: Iterator[tuple[Path, str]], what: str) -> Iterator[Finding]:
    first: dict[str, Path] = {}
    for path, text in named:
        if text in first:
            yield path, f"duplicate {what} {text}", f"{format_path(first[text])} has it already"
        first.setdefault(text, path)
