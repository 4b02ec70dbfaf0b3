"""What a trainer asks of a group, read out of its bodies before anything is forwarded.

Unknown keys are nobody's concern; numbers may come as text (weight-sync.md 3.1). Invariant: what
is read here without an error can't hang a member for being malformed. Errors are GroupError, whose
text is meant for the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from omni_proxy.process_group.rendezvous import NCCL, Rendezvous, validated_address
from omni_proxy.process_group.tensor_plan import GroupError, parse_plans

GROUP_NAME: Final = "weight_update_group"
LARGE_BYTES: Final = 256 * 1024  # takes longer to read than a task may


@dataclass(frozen=True, slots=True)
class InitAsked:
    """A group, and which ranks of it are meant for us. `force` takes it over from its owner."""

    group_name: str
    host: str
    port: int
    rank_offset: int
    world_size: int
    force: bool = False

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PrepareAsked:
    """`batched`: it announces the whole sync, which one complete ends. `load` in bytes."""

    group_name: str
    batched: bool
    buckets: int
    names: frozenset[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Marks:
    """What a call that applies something says of the sync that it is a part of."""

    flush_cache: bool | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False

    @property
    def last(self) -> bool:
        """It says so itself: nothing is announced that would come after it."""
        return self.flush_cache is True or self.weight_version is not None


def object_of(raw: bytes) -> dict[str, Any]:
    """Raises GroupError for anything but a JSON object.

    Large ones are read piece by piece: while one is, no other thread of ours can do anything.
    """
    try:
        if len(raw) < LARGE_BYTES:
            value = msgspec.json.decode(raw) if raw else {}
        else:
            value = _in_pieces(raw)
    except msgspec.ValidationError:
        raise GroupError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GroupError(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise GroupError("the body must be a JSON object")
    return value


def _in_pieces(raw: bytes) -> dict[str, Any]:
    pieces = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {key: _piece(key, piece) for key, piece in pieces.items()}


def _piece(key: str, piece: msgspec.Raw) -> Any:
    if key == "buckets":
        try:
            buckets = msgspec.json.decode(piece, type=list[msgspec.Raw])
        except msgspec.ValidationError:
            return msgspec.json.decode(piece)  # it is said elsewhere that it should be a list
        return [msgspec.json.decode(bucket) for bucket in buckets]
    return msgspec.json.decode(piece)


def init_of(body: Mapping[str, Any]) -> InitAsked:
    """Raises GroupError, also for ranks that could belong to nobody."""
    offset, world = _whole(body, "rank_offset"), _whole(body, "world_size")
    name = group_name_of(body)
    backend = body.get("backend") or NCCL
    address, port = body.get("master_address"), body.get("master_port")
    # Its rank is judged with the ranks of all members, where the numbers can be shown.
    place = Rendezvous(_text(address), _port(port), 1, max(world, 2), name, backend)
    host, port = validated_address(place)
    return InitAsked(name, host, port, offset, world, body.get("force") is True)


def prepare_of(body: Mapping[str, Any]) -> PrepareAsked:
    """Of both forms of a prepare, and of an update in one phase. Raises GroupError."""
    plans = parse_plans(body)
    names = frozenset(tensor.name for plan in plans for tensor in plan.tensors)
    nbytes = sum(tensor.nbytes for plan in plans for tensor in plan.tensors)
    return PrepareAsked(group_name_of(body), bool(body.get("buckets")), len(plans), names, nbytes)


def marks_of(body: Mapping[str, Any]) -> Marks:
    flush, version = body.get("flush_cache"), body.get("weight_version")
    return Marks(
        flush if isinstance(flush, bool) else None,
        str(version) if version is not None else None,
        body.get("abort_all_requests") is True,
    )


def group_name_of(body: Mapping[str, Any]) -> str:
    """Raises GroupError for what is no name."""
    name = body.get("group_name")
    if name is None:
        return GROUP_NAME
    if not isinstance(name, str) or not name:
        raise GroupError(f"group_name must be a non-empty string, not {name!r}")
    return name


def _whole(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        told = "it is missing" if key not in body else f"not {value!r}"
        raise GroupError(f"{key} must be a whole number: {told}")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _port(value: object) -> int | str:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else 0
