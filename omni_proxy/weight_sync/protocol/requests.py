"""Parses the bodies of a trainer's group calls before anything is forwarded. Pure.

Unknown keys are ignored; numbers may come as text (weight-sync.md 3.1). Invariant: a body that
parses here is not malformed in a way that could hang a member. Errors are GroupError, with a
message for the trainer.

Which ranks of a trainer's group each member takes: consecutive, from the given rank offset.
Pure.

Invariant: a layout that is returned fits the group and gives no rank twice. One that does not fit
would hang all parties until the group's timeout, so it is refused, and the error shows the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from omni_proxy.process_group.rendezvous import NCCL, Rendezvous, validated_address
from omni_proxy.process_group.tensor_plan import GroupError, parse_plans

GROUP_NAME: Final = "weight_update_group"
LARGE_BYTES: Final = 256 * 1024  # takes longer to parse than the event loop may be blocked


@dataclass(frozen=True, slots=True)
class InitRequest:
    """A group to join, and the ranks meant for this proxy. `force` takes it over from its owner."""

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
class PrepareRequest:
    """`batched`: it announces the whole sync, which one complete call ends."""

    group_name: str
    batched: bool
    buckets: int
    names: frozenset[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class UpdateFlags:
    """What a call that applies weights says about the sync that it belongs to."""

    flush_cache: bool | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False

    @property
    def last(self) -> bool:
        """Whether the call says that it is the last one of its round."""
        return self.flush_cache is True or self.weight_version is not None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises GroupError for anything but a JSON object.

    Large bodies are parsed value by value: while msgspec decodes, no other thread can run.
    """
    try:
        if len(raw) < LARGE_BYTES:
            value = msgspec.json.decode(raw) if raw else {}
        else:
            value = _parse_large(raw)
    except msgspec.ValidationError:
        raise GroupError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GroupError(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise GroupError("the body must be a JSON object")
    return value


def _parse_large(raw: bytes) -> dict[str, Any]:
    values = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {key: _parse_value(key, value) for key, value in values.items()}


def _parse_value(key: str, value: msgspec.Raw) -> Any:
    if key == "buckets":
        try:
            buckets = msgspec.json.decode(value, type=list[msgspec.Raw])
        except msgspec.ValidationError:
            return msgspec.json.decode(value)  # parse_prepare reports that it must be a list
        return [msgspec.json.decode(bucket) for bucket in buckets]
    return msgspec.json.decode(value)


def parse_init(body: Mapping[str, Any]) -> InitRequest:
    """Raises GroupError, also for ranks that are out of range in any group."""
    offset, world = _parse_int(body, "rank_offset"), _parse_int(body, "world_size")
    name = parse_group_name(body)
    backend = body.get("backend") or NCCL
    address, port = body.get("master_address"), body.get("master_port")
    # The rank is validated with the ranks of all members, where the error can show the numbers.
    rendezvous = Rendezvous(_text(address), _port(port), 1, max(world, 2), name, backend)
    host, port = validated_address(rendezvous)
    return InitRequest(name, host, port, offset, world, body.get("force") is True)


def parse_prepare(body: Mapping[str, Any]) -> PrepareRequest:
    """Both forms of a prepare, and an update in one phase. Raises GroupError."""
    plans = parse_plans(body)
    names = frozenset(tensor.name for plan in plans for tensor in plan.tensors)
    nbytes = sum(tensor.nbytes for plan in plans for tensor in plan.tensors)
    return PrepareRequest(
        parse_group_name(body), bool(body.get("buckets")), len(plans), names, nbytes
    )


def parse_flags(body: Mapping[str, Any]) -> UpdateFlags:
    flush, version = body.get("flush_cache"), body.get("weight_version")
    return UpdateFlags(
        flush if isinstance(flush, bool) else None,
        str(version) if version is not None else None,
        body.get("abort_all_requests") is True,
    )


def parse_group_name(body: Mapping[str, Any]) -> str:
    """Raises GroupError if the name is not a non-empty string."""
    name = body.get("group_name")
    if name is None:
        return GROUP_NAME
    if not isinstance(name, str) or not name:
        raise GroupError(f"group_name must be a non-empty string, not {name!r}")
    return name


def _parse_int(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        problem = "it is missing" if key not in body else f"not {value!r}"
        raise GroupError(f"{key} must be a whole number: {problem}")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _port(value: object) -> int | str:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else 0


def count_ranks(info: object) -> int:
    """The number of ranks of a server, from its /server_info; 1 if it does not say."""
    size = info.get("tp_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1


class RankLayoutError(ValueError):
    """The ranks do not fit; the message is for the sender of the numbers."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks of one member: `ranks` of them from rank `offset` on."""

    name: str
    ranks: int
    offset: int


def assign_ranks(
    rank_offset: int, world_size: int, ranks: Mapping[str, int]
) -> tuple[RankRange, ...]:
    """In the order of `ranks` (member to its number of ranks). Raises RankLayoutError."""
    total = sum(ranks.values())
    listing = ", ".join(f"{name}: {count}" for name, count in ranks.items())
    if not ranks or min(ranks.values()) < 1:
        raise RankLayoutError(
            f"every member needs a rank at least, and there must be one: {listing}"
        )
    if rank_offset < 1:
        raise RankLayoutError(
            f"rank_offset {rank_offset}: rank 0 is the trainer's, so ours begin at 1 or later"
        )
    end = rank_offset + total
    if end > world_size:
        raise RankLayoutError(
            f"rank_offset {rank_offset} + {total} ranks behind this endpoint ({listing}) = {end}, "
            f"but world_size is {world_size}: a group with them needs at least {end}. The tp_size "
            "of this endpoint's /server_info is the number of its ranks"
        )
    ranges, offset = [], rank_offset
    for name, count in ranks.items():
        ranges.append(RankRange(name, count, offset))
        offset += count
    return tuple(ranges)
