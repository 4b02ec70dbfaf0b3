"""Settings of a publisher of KV events, and what an endpoint of ZeroMQ means to it.

Contract: real-engines.md 4 (vLLM 0.32: keys, defaults, when it binds and when it connects).
Invariant: a `KvEventSettings` holds values in range, and endpoints of a known form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

Form: TypeAlias = Literal["vllm", "sglang"]
FORMS: Final[tuple[Form, ...]] = ("vllm", "sglang")
DEFAULT_ENDPOINT: Final = "tcp://*:5557"
DEFAULT_BLOCK_SIZE: Final = 16
MAX_COUNT: Final = 10_000_000
WILDCARD: Final = "*"
_TCP: Final = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%]+\]|::|[^\s:/\[\]*]+):([0-9]{1,5})")


class KvEventSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`endpoint` "" publishes nothing, `replay_endpoint` "" repeats nothing.

    `host` is what `*` of an endpoint stands for: the address that the replica serves HTTP on, so
    that prompts are readable nowhere else. The last `buffer_steps` batches can be asked for again.
    `hwm` is how many batches wait for a slow subscriber, `max_queue_size` for the publisher; more
    are dropped.
    """

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    form: Form = "vllm"
    block_size: int = DEFAULT_BLOCK_SIZE
    host: str = "127.0.0.1"
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, name):
                _check_endpoint(name, getattr(self, name))
        if self.endpoint and not binds(self.endpoint) and tcp_parts(self.endpoint)[1] == 0:
            raise ValueError(f"endpoint {self.endpoint}: there is no port 0 to connect to")
        if self.replay_endpoint and not self.endpoint:
            raise ValueError("replay_endpoint needs an endpoint")
        for name in ("block_size", "buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ValueError(f"{name} must be within 1 and {MAX_COUNT}")

    @property
    def enabled(self) -> bool:
        return bool(self.endpoint)


def parse_kv_event_settings(params: Mapping[str, Any]) -> KvEventSettings:
    """Raises ValueError for parameters that are unknown or out of range."""
    try:
        return msgspec.convert(dict(params), KvEventSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_events: {error}") from None


def binds(endpoint: str) -> bool:
    """Whether a publisher listens there, as vLLM decides it; else it connects to a subscriber."""
    return WILDCARD in endpoint or "::" in endpoint or not endpoint.startswith("tcp:")


def tcp_parts(endpoint: str) -> tuple[str, int]:
    """Host and port; the port of an ipc endpoint is -1."""
    match = _TCP.fullmatch(endpoint)
    return (match[1], int(match[2])) if match else ("", -1)


def bind_address(endpoint: str, host: str) -> str:
    """The endpoint with `host` for a wildcard."""
    named, port = tcp_parts(endpoint)
    if named != WILDCARD:
        return endpoint.replace("tcp://:::", "tcp://[::]:") if named == "::" else endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _check_endpoint(name: str, endpoint: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    _, port = tcp_parts(endpoint)
    if not 0 <= port <= 65535:
        raise ValueError(
            f"{name} {endpoint!r} is neither tcp://HOST:PORT, with * for this replica's address, "
            "nor ipc://PATH"
        )
