"""Flags of sglang-router and vllm-router that set several keys: `--prefill URL [PORT|none]` and
`--decode URL` with the KV transfer protocol, and `--service-discovery` with its companions.

Pure. Invariant: flags that those routers accept have the same effect here and find the same pods,
or raise ConfigError with the flag's name. As there, the companions of --service-discovery have no
effect without it. Source: note:features 2.5, 5 and 9, note:routers 1.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from omni_proxy.config.configuration_flags import flag_error
from omni_proxy.config.problem import did_you_mean, to_toml_literal
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.config.tables.discover import DiscoverEntry, is_label_key, parse_selector
from omni_proxy.config.url import normalize_url
from omni_proxy.shared.engine_protocol import KvConnector
from omni_proxy.shared.origins import MAX_PORT

CONNECTORS: Final[dict[str, KvConnector]] = {
    "sglang": "sglang", "nixl": "nixl", "mooncake": "mooncake",
}  # fmt: skip
SGLANG: Final = "--pd-disaggregation"
VLLM: Final = "--vllm-pd-disaggregation"
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
    has_pools = flags.prefill or flags.decode
    if has_pools and not (flags.sglang or flags.vllm or flags.connector):
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
    if len(texts) == 1 and text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_PORT:
        return int(text)
    shown = " ".join(texts)
    reason = f'{to_toml_literal(url)}: "{shown}" is not a bootstrap port; write a number or "none"'
    findings.append(("--prefill", reason, ""))
    return None


FLAG: Final = "--service-discovery"
DEFAULT_PORT: Final = 80
ALL_NAMESPACES: Final = "*"  # the default of those routers
_Selector = tuple[str, Sequence[str], Literal["", "prefill", "decode"]]


@dataclass(frozen=True, slots=True)
class DiscoveryFlags:
    """The flags as given; selectors are lists of KEY=VALUE. `connector`: for prefill and decode
    workers; None if no flag enables them."""

    on: bool = False
    selector: Sequence[str] = ()
    prefill_selector: Sequence[str] = ()
    decode_selector: Sequence[str] = ()
    port: str = ""
    namespace: str = ""
    model_id_from: str = ""
    connector: KvConnector | None = None


def discover_entries(flags: DiscoveryFlags) -> tuple[DiscoverEntry, ...]:
    """One table for each selector. Raises ConfigError."""
    if not flags.on:
        return ()
    pools: tuple[_Selector, ...] = (
        ("--prefill-selector", flags.prefill_selector, "prefill"),
        ("--decode-selector", flags.decode_selector, "decode"),
    )
    plain: tuple[_Selector, ...] = (("--selector", flags.selector, ""),)
    selectors = [
        selector for selector in (plain if flags.connector is None else pools) if selector[1]
    ]
    if not selectors:
        which = "--selector" if flags.connector is None else "--prefill-selector, --decode-selector"
        raise flag_error([(FLAG, "needs a selector", f"add {which} KEY=VALUE")])
    if flags.connector is None and (flags.prefill_selector or flags.decode_selector):
        flag = "--prefill-selector" if flags.prefill_selector else "--decode-selector"
        hint = "add --pd-disaggregation for SGLang, or --vllm-pd-disaggregation for vLLM"
        raise flag_error([(flag, "needs a flag for the KV transfer protocol", hint)])
    port, model_label = _service_port(flags.port), _model_label(flags.model_id_from)
    return tuple(
        DiscoverEntry(
            name="-".join(filter(None, (FLAG.removeprefix("--"), role))),
            namespace=flags.namespace or ALL_NAMESPACES,
            selector=_selector(flag, pairs),
            port=port,
            role=role,
            model_label=model_label,
            kv_connector=flags.connector or "" if role else "",
        )
        for flag, pairs, role in selectors
    )


def _selector(flag: str, pairs: Sequence[str]) -> str:
    for pair in pairs:
        if "=" not in pair:
            raise flag_error([(flag, f'"{pair}" has no "="', "write KEY=VALUE")])
    text = ",".join(pairs)
    try:
        parse_selector(text)
    except ValueError as error:
        raise flag_error([(flag, str(error.args[0]), "write KEY=VALUE")]) from None
    return text


def _service_port(text: str) -> int:
    if not text:
        return DEFAULT_PORT
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_PORT:
        return int(text)
    reason = f"{to_toml_literal(text)} is not a port"
    raise flag_error([("--service-discovery-port", reason, f"write a number from 1 to {MAX_PORT}")])


def _model_label(text: str) -> str:
    """The key of the pod label that has the model."""
    source, _, key = text.partition(":")
    if not text or (source == "label" and is_label_key(key)):
        return key
    reason = f"{to_toml_literal(text)} is not supported"
    hint = "write label:KEY, or give the pods the annotation omni-proxy.dev/model"
    raise flag_error([("--model-id-from", reason, hint)])
