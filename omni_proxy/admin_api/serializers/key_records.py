"""Callers' keys as JSON and as metrics: names, limits and usage.

Invariant: the output contains neither a key nor its hash.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric

from omni_proxy.admin_api.services import KeyServices
from omni_proxy.api_keys.caller_limits import REASONS
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import SavedKey
from omni_proxy.telemetry.prometheus import counters, gauges

UNKNOWN = ""  # the name for requests without a valid key
UNKNOWN_REASON = "invalid_api_key"
_UNKNOWN_CELL = f"refused_{REASONS[0]}"
_TOKENS = {"input": "input_tokens", "output": "output_tokens"}


def key_records(keys: KeyServices, config: Config) -> list[dict[str, object]]:
    usage = keys.usage()
    return [
        {
            "name": entry.name,
            "models": list(entry.models),
            "max_inflight": entry.max_inflight,
            "requests_per_minute": entry.requests_per_minute,
            "tokens_per_minute": entry.tokens_per_minute,
            "priority": entry.priority,
            "origin": "api" if isinstance(entry, SavedKey) else "file",
            **_usage(usage.get(entry.name, {})),
        }
        for entry in config.keys
    ]


def refused_without_key(keys: KeyServices) -> int:
    return keys.usage().get(UNKNOWN, {}).get(_UNKNOWN_CELL, 0)


def key_refusals(keys: KeyServices) -> dict[str, int]:
    """Requests without a valid key, since the start and in the last minute."""
    counts = keys.usage().get(UNKNOWN, {})
    return {
        "refused_without_key": counts.get(_UNKNOWN_CELL, 0),
        "refused_without_key_last_minute": counts.get("refused_last_minute", 0),
    }


def _usage(counts: dict[str, int]) -> dict[str, object]:
    used: dict[str, object] = {
        name: counts.get(name, 0)
        for name in ("in_flight", "requests", "input_tokens", "output_tokens")
    }
    used["refused"] = {reason: counts.get(f"refused_{reason}", 0) for reason in REASONS}
    return used


def key_metrics(keys: KeyServices, config: Config) -> Iterator[Metric]:
    names = [entry.name for entry in config.keys]
    usage = keys.usage()
    counts = [(name, usage.get(name, {})) for name in names]

    def of(what: str) -> list[tuple[tuple[str], float]]:
        return [((name,), of_key.get(what, 0)) for name, of_key in counts]

    yield from gauges(
        "key_requests_in_flight", "Model requests in flight of a caller", ("key",), of("in_flight")
    )
    yield from counters("key_requests", "Requests of a caller", ("key",), of("requests"))
    tokens = [
        ((name, kind), of_key.get(cell, 0))
        for name, of_key in counts
        for kind, cell in _TOKENS.items()
    ]
    text = "Tokens of a caller, estimated if responses report none"
    yield from counters("key_tokens", text, ("key", "kind"), tokens)
    refused: list[tuple[tuple[str, str], float]] = [
        ((name, reason), of_key.get(f"refused_{reason}", 0))
        for name, of_key in counts
        for reason in REASONS
    ]
    refused.append(((UNKNOWN, UNKNOWN_REASON), refused_without_key(keys)))
    text = "Refused requests of a caller; the caller is empty for requests without a valid key"
    yield from counters("key_refused", text, ("key", "reason"), refused)
