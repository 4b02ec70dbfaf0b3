"""Prefill and decode workers of the command line, in the syntax of sglang-router and vllm-router:
`--prefill URL [PORT|none]`, `--decode URL`, and the flags that select the KV transfer protocol.

Pure. Invariant: flags that those routers accept have the same effect here, or raise ConfigError
that names the flag. Source: features.md 2.5 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from omni_proxy.config.fields import KvConnector
from omni_proxy.config.flags import flag_error
from omni_proxy.config.problem import did_you_mean, to_toml_literal
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.config.url import normalize_url

CONNECTORS: Final[dict[str, KvConnector]] = {
    "sglang": "sglang", "nixl": "nixl", "mooncake": "mooncake",
}  # fmt: skip
SGLANG: Final = "--pd-disaggregation"
VLLM: Final = "--vllm-pd-disaggregation"
LAST_PORT: Final = 65535
_Finding = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class PoolFlags:
    """The flags as given. `prefill`: each a URL and an optional port; `connector` "": not given."""

    prefill: Sequence[Sequence[str]] = ()
    decode: Sequence[str] = ()
    sglang: bool = False
    vllm: bool = False
    connector: str = ""


def connector_of(flags: PoolFlags) -> KvConnector:
    """The KV transfer protocol of this command line's pools. Raises ConfigError."""
    if flags.sglang and flags.vllm:
        raise flag_error([(SGLANG, f"can't be combined with {VLLM}", "name one of them")])
    if not flags.connector:
        return "nixl" if flags.vllm else "sglang"
    connector = CONNECTORS.get(flags.connector)
    if connector is None:
        reason = f"{to_toml_literal(flags.connector)} is not one of {', '.join(CONNECTORS)}"
        hint = did_you_mean(flags.connector, CONNECTORS)
        if flags.connector == "moriio":
            reason, hint = '"moriio" is not supported', "use nixl or mooncake"
        raise flag_error([("--kv-connector", reason, hint)])
    if flags.sglang and connector != "sglang":
        reason = f"{connector} connects vLLM engines, {SGLANG} is for SGLang"
        raise flag_error([("--kv-connector", reason, f"use {VLLM}")])
    if flags.vllm and connector == "sglang":
        raise flag_error([("--kv-connector", f"{VLLM} needs nixl or mooncake", "")])
    return connector


def pool_workers(flags: PoolFlags, urls: Iterable[str]) -> tuple[WorkerEntry, ...]:
    """The workers of `--prefill` and `--decode`, in their order. `urls`: from --worker-urls.

    Raises ConfigError with all problems.
    """
    connector = connector_of(flags)
    named = flags.prefill or flags.decode
    if named and not (flags.sglang or flags.vllm or flags.connector):
        flag = "--prefill" if flags.prefill else "--decode"
        reason = "needs a flag for the KV transfer protocol"
        raise flag_error([(flag, reason, f"add {SGLANG} for SGLang, or {VLLM} for vLLM")])
    findings: list[_Finding] = []
    workers: dict[str, WorkerEntry] = {}
    known = set(urls)
    for entry in _entries(flags, connector, findings):
        if entry.url in workers or entry.url in known:
            flag = "--prefill" if entry.role == "prefill" else "--decode"
            findings.append((flag, f"{to_toml_literal(entry.url)}: is named twice", ""))
        workers[entry.url] = entry
    if findings:
        raise flag_error(findings)
    return tuple(workers.values())


def _entries(
    flags: PoolFlags, connector: KvConnector, findings: list[_Finding]
) -> Iterator[WorkerEntry]:
    """Appends problems to `findings`."""
    for url, *ports in flags.prefill:
        base = _url("--prefill", url, findings)
        port = _port(url, ports, findings)
        if base and port is not None:
            yield WorkerEntry(url=base, role="prefill", kv_connector=connector, bootstrap_port=port)
    for url in flags.decode:
        if base := _url("--decode", url, findings):
            yield WorkerEntry(url=base, role="decode", kv_connector=connector)


def _url(flag: str, text: str, findings: list[_Finding]) -> str:
    """The normalized URL, or "" if it is invalid."""
    try:
        return normalize_url(text, allow_unix=False)
    except ValueError as error:
        findings.append((flag, f"{to_toml_literal(text)}: {error}", ""))
        return ""


def _port(url: str, texts: Sequence[str], findings: list[_Finding]) -> int | None:
    """The bootstrap port, 0 if it is unknown, None if it is invalid."""
    if not texts or (len(texts) == 1 and texts[0].lower() == "none"):
        return 0
    text = texts[0]
    if len(texts) == 1 and text.isascii() and text.isdecimal() and 1 <= int(text) <= LAST_PORT:
        return int(text)
    shown = " ".join(texts)
    reason = f'{to_toml_literal(url)}: "{shown}" is not a bootstrap port; write a number or "none"'
    findings.append(("--prefill", reason, ""))
    return None
