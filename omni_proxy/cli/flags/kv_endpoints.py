"""The endpoints of KV events in the flags of launched replicas: each replica needs its own ports.

Replica i gets the given port + i, as vLLM's ranks do, by the placeholder `{PORT+index}`. Port 0 is
any free one, and an endpoint that connects may be the same for all. PURE.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

EVENTS: Final = "--kv-events"
REPLAY: Final = "--kv-replay"
CONFIG: Final = "--kv-events-config"
FLAGS: Final = (EVENTS, REPLAY, CONFIG)
_PORT: Final = re.compile(r"(tcp://.*:)([0-9]+)")


class PortsOverlapError(ValueError):
    """Two replicas would get the same port; the text gives the remedy."""


def publishes(flags: Sequence[str]) -> bool:
    """Whether replicas with these flags publish KV events."""
    return any(flag.partition("=")[0] in (EVENTS, CONFIG) for flag in flags)


def ports_apart(flags: Sequence[str], first: int, count: int) -> tuple[str, ...]:
    """The flags of `count` replicas, the first of which is replica `first` of all.

    Raises PortsOverlapError.
    """
    ports: list[int] = []
    changed: list[str] = []
    name = ""
    for word in flags:
        flag, equals, value = word.partition("=")
        if equals and flag in FLAGS:
            changed.append(f"{flag}={_value(flag, value, first, ports)}")
        elif name in FLAGS:
            changed.append(_value(name, word, first, ports))
        else:
            changed.append(word)
        name = word if name not in FLAGS else ""
    for one, other in zip(sorted(ports), sorted(ports)[1:], strict=False):
        if other - one < first + count:
            raise PortsOverlapError(
                f"KV events: ports {one} and {other} are too close for {first + count} replicas, "
                "each of which takes the next ones: name others, or port 0 for any free one"
            )
    return tuple(changed)


def _value(flag: str, value: str, first: int, ports: list[int]) -> str:
    if flag != CONFIG:
        return _endpoint(value, first, ports, always_binds=flag == REPLAY)
    try:
        config = json.loads(value)
    except ValueError:
        return value  # the engine says what is wrong with it
    if not isinstance(config, dict):
        return value
    for key, endpoint in _endpoints(config):
        always = key == "replay_endpoint"
        config[key] = _endpoint(endpoint, first, ports, always_binds=always)
    return json.dumps(config)


def _endpoints(config: dict[str, object]) -> Iterator[tuple[str, str]]:
    # vLLM and SGLang publish there if nothing is named.
    config.setdefault("endpoint", "tcp://*:5557")
    for key in ("endpoint", "replay_endpoint"):
        value = config.get(key)
        if isinstance(value, str):
            yield key, value


def _endpoint(text: str, first: int, ports: list[int], *, always_binds: bool) -> str:
    match = _PORT.fullmatch(text)
    if match is None or not (always_binds or "*" in text or "::" in text) or not int(match[2]):
        return text
    ports.append(int(match[2]))
    return f"{match[1]}{{{int(match[2]) + first}+index}}"
