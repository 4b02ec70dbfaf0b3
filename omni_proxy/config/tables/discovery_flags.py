"""Discovery of pods by the flags of sglang-router and vllm-router: `--service-discovery` and its
companions.

Pure. Invariant: the flags find the same pods as in those routers. Flags that would find none, or
that leave open how prefill and decode workers transfer KV caches, raise ConfigError with the flag's
name. As there, the others have no effect without --service-discovery. Source: features.md 9,
routers.md 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from omni_proxy.config.fields import KvConnector
from omni_proxy.config.flags import flag_error
from omni_proxy.config.problem import to_toml_literal
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.tables.label_selector import is_label_key, parse_selector

FLAG: Final = "--service-discovery"
DEFAULT_PORT: Final = 80
ALL_NAMESPACES: Final = "*"  # the default of those routers
LAST_PORT: Final = 65535
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
    given = [each for each in (plain if flags.connector is None else pools) if each[1]]
    if not given:
        which = "--selector" if flags.connector is None else "--prefill-selector, --decode-selector"
        raise flag_error([(FLAG, "needs a selector", f"add {which} KEY=VALUE")])
    if flags.connector is None and (flags.prefill_selector or flags.decode_selector):
        flag = "--prefill-selector" if flags.prefill_selector else "--decode-selector"
        hint = "add --pd-disaggregation for SGLang, or --vllm-pd-disaggregation for vLLM"
        raise flag_error([(flag, "needs a flag for the KV transfer protocol", hint)])
    port, model_label = _port(flags.port), _model_label(flags.model_id_from)
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
        for flag, pairs, role in given
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


def _port(text: str) -> int:
    if not text:
        return DEFAULT_PORT
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= LAST_PORT:
        return int(text)
    reason = f"{to_toml_literal(text)} is not a port"
    raise flag_error([("--service-discovery-port", reason, "write a number from 1 to 65535")])


def _model_label(text: str) -> str:
    """The key of the pod label that has the model."""
    source, _, key = text.partition(":")
    if not text or (source == "label" and is_label_key(key)):
        return key
    reason = f"{to_toml_literal(text)} is not supported"
    hint = "write label:KEY, or give the pods the annotation omni-proxy.dev/model"
    raise flag_error([("--model-id-from", reason, hint)])
