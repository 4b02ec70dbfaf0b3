"""Parses the bodies of a trainer's calls, and lays out the ranks of a group. Pure.

Group calls (note:weight-sync 3.1): unknown keys are ignored; numbers may be strings. vLLM's weight
transfer (note:features 3.2): `init_info` and `update_info` belong to the engines' backend (nccl,
ipc, m2n and others). They are opaque except for the ranks: each worker gets its own `rank_offset`,
and its own part of a list with an entry for each rank. The participants' ranks are consecutive from
the trainer's offset. Invariant: a body that parses here, with a layout that is returned, can't make
a participant wait until the group's timeout. Errors of bodies are GroupError, those of a layout
RankLayoutError, with a message for the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec

from omni_proxy.process_group.rendezvous import NCCL, Rendezvous, validated_address
from omni_proxy.process_group.tensor_plan import ITEM_BYTES, GroupError, parse_plans
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.shared.engine_protocol import DEFAULT_WEIGHT_GROUP

LARGE_BYTES: Final = 256 * 1024  # parsing more than this would block the event loop for too long


@dataclass(frozen=True, slots=True)
class InitRequest:
    """A group to join, and this proxy's ranks in it. `force`: take over from the present owner."""

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
    """The announcement of buckets. `batched`: it announces the whole sync, for one complete."""

    group_name: str
    batched: bool
    buckets: int
    names: frozenset[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class UpdateFlags:
    """Fields of a call that applies weights that affect its sync."""

    flush_cache: bool | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False

    @property
    def last(self) -> bool:
        """Whether the call is marked as the last one of its round."""
        return self.flush_cache is True or self.weight_version is not None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises GroupError if the body is not a JSON object.

    Large bodies are parsed value by value, because msgspec holds the GIL while it decodes.
    """
    try:
        if len(raw) < LARGE_BYTES:
            value = msgspec.json.decode(raw) if raw else {}
        else:
            value = _parse_large(raw)
    except msgspec.ValidationError:
        raise GroupError("the body must be a JSON object") from None
    except MALFORMED as error:
        raise GroupError(f"the body is not JSON: {error}") from None
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
    """Raises GroupError, also for ranks that would be invalid in any group."""
    offset, world = _parse_int(body, "rank_offset"), _parse_int(body, "world_size")
    name = parse_group_name(body)
    backend = body.get("backend") or NCCL
    address, port = body.get("master_address"), body.get("master_port")
    # `assign_ranks` validates the rank with those of all participants, and its error has the
    # numbers.
    rendezvous = Rendezvous(_text(address), _port(port), 1, max(world, 2), name, backend)
    host, port = validated_address(rendezvous)
    return InitRequest(name, host, port, offset, world, body.get("force") is True)


def parse_prepare(body: Mapping[str, Any]) -> PrepareRequest:
    """Parse either form of a prepare, or an update in one phase. Raises GroupError."""
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
        return DEFAULT_WEIGHT_GROUP
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


# vLLM's groups have no names on the wire; the proxy uses this name for them.
TRANSFER_GROUP: Final = "vllm weight transfer"
LISTS: Final = ("names", "dtype_names", "shapes")


@dataclass(frozen=True, slots=True)
class TransferInit:
    """An init call. `info`: the trainer's init_info. `address`: its store, None if it has none.

    `rank_offset` and `world_size` are None for a backend without ranks, such as ipc. `force`: take
    over even from a trainer that is alive.
    """

    info: Mapping[str, Any]
    address: tuple[str, int] | None
    rank_offset: int | None
    world_size: int | None
    force: bool = False

    @property
    def shown_address(self) -> str:
        """The address for messages."""
        if self.address is None:
            return "no address"
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def body_for(self, rank_offset: int) -> bytes:
        """The body of the init call for the participant with this first rank."""
        fields = {"rank_offset": rank_offset, "world_size": self.world_size}
        ranks = {} if self.rank_offset is None else fields
        return json.dumps({"init_info": {**self.info, **ranks}}).encode()


@dataclass(frozen=True, slots=True)
class TransferUpdate:
    """One chunk of weights. `parts`: an entry for each rank, None if all get the same body."""

    body: bytes
    parts: tuple[Any, ...] | None
    names: frozenset[str]
    nbytes: int

    def body_for(self, rank_range: RankRange, first_rank: int) -> bytes:
        """The update body for `rank_range`; the ranks of all participants begin at `first_rank`."""
        if self.parts is None:
            return self.body
        begin = rank_range.offset - first_rank
        parts = self.parts[begin : begin + rank_range.rank_count]
        return json.dumps({"update_info": parts}).encode()


def parse_transfer_init(body: Mapping[str, Any]) -> TransferInit:
    """Raises GroupError, also for ranks that would be invalid in any group."""
    info = body.get("init_info")
    if not isinstance(info, dict):
        raise GroupError(
            "body.init_info is missing: an object with the fields that the engines' backend needs, "
            "for nccl master_address, master_port, rank_offset and world_size"
        )
    offset, world = (_whole(info, key) for key in ("rank_offset", "world_size"))
    if (offset is None) is not (world is None):
        raise GroupError("init_info needs both rank_offset and world_size, or neither")
    address = None
    if info.get("master_address") is not None or info.get("master_port") is not None:
        # `assign_ranks` validates the rank with those of all participants.
        host, port = info.get("master_address"), info.get("master_port")
        address = validated_address(
            Rendezvous(_text(host), _port(port), 1, max(world or 2, 2), TRANSFER_GROUP)
        )
    force = body.get("force") is True
    return TransferInit(info, address, offset, world, force)


def parse_transfer_update(raw: bytes, body: Mapping[str, Any], rank_count: int) -> TransferUpdate:
    """`ranks`: the number of ranks behind this endpoint. Raises GroupError."""
    info = body.get("update_info")
    if not isinstance(info, dict | list):
        raise GroupError("body.update_info is missing: an object, or a list with one for each rank")
    parts = tuple(info) if isinstance(info, list) else None
    if parts is not None and len(parts) != rank_count:
        raise GroupError(
            f"update_info is a list of {len(parts)}, and there are {rank_count} ranks behind this "
            "endpoint: it needs one entry for each, in the order of the ranks"
        )
    names: set[str] = set()
    nbytes = 0
    for part in [info] if parts is None else parts:
        announced, size = _announced(part)
        names |= announced
        nbytes += size
    return TransferUpdate(raw, parts, frozenset(names), nbytes)


def parse_finish(body: Mapping[str, Any]) -> str | None:
    """The label of the version, None if the trainer sends none. Raises GroupError."""
    label = body.get("weight_version")
    if label is not None and not isinstance(label, str):
        raise GroupError(f"weight_version must be a string or null, not {label!r}")
    return label


def _announced(info: object) -> tuple[set[str], int]:
    """Tensor names and total bytes, if the backend announces them. Raises GroupError."""
    if not isinstance(info, dict):
        raise GroupError("each entry of update_info must be an object")
    lists = {key: info[key] for key in LISTS if isinstance(info.get(key), list)}
    if len({len(values) for values in lists.values()}) > 1:
        sizes = ", ".join(f"{len(values)} {key}" for key, values in lists.items())
        raise GroupError(f"update_info needs as many names as dtype_names and shapes, not {sizes}")
    names = {str(name) for name in lists.get("names", ())}
    return names, _bytes_of(lists.get("dtype_names", ()), lists.get("shapes", ()))


def _bytes_of(dtypes: Sequence[object], shapes: Sequence[object]) -> int:
    """Total bytes for the metrics; a tensor of unknown type or shape counts as 0."""
    total = 0
    for dtype, shape in zip(dtypes, shapes, strict=False):
        sizes = shape if isinstance(shape, list) else [0]
        if all(type(size) is int and size >= 0 for size in sizes):
            total += prod(sizes) * ITEM_BYTES.get(str(dtype).removeprefix("torch."), 0)
    return total


def _whole(info: Mapping[str, Any], key: str) -> int | None:
    value = info.get(key)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise GroupError(f"init_info.{key} must be a whole number, not {value!r}")
    return value


# The ranks of a group's participants.


def count_ranks(info: object) -> int:
    """The number of ranks of a worker, from its /server_info; 1 if it reports none."""
    size = info.get("tp_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1


class RankLayoutError(ValueError):
    """The ranks don't fit into the group; the message is for the caller that sent the numbers."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks of one participant: `rank_count` consecutive ones, starting at `offset`."""

    name: str
    rank_count: int
    offset: int


def assign_ranks(
    rank_offset: int, world_size: int, rank_counts: Mapping[str, int]
) -> tuple[RankRange, ...]:
    """Assign ranges in the order of `rank_counts` (participant to rank count).

    Raises RankLayoutError.
    """
    total = sum(rank_counts.values())
    listing = ", ".join(f"{name}: {count}" for name, count in rank_counts.items())
    if not rank_counts or min(rank_counts.values()) < 1:
        raise RankLayoutError(
            f"there must be a participant, and each needs at least one rank: {listing}"
        )
    if rank_offset < 1:
        raise RankLayoutError(
            f"rank_offset {rank_offset}: rank 0 is the trainer's, so it must be 1 or higher"
        )
    end = rank_offset + total
    if end > world_size:
        raise RankLayoutError(
            f"rank_offset {rank_offset} + {total} ranks behind this endpoint ({listing}) = {end}, "
            f"but world_size is {world_size}: a group with them needs at least {end}. The tp_size "
            "of this endpoint's /server_info is the number of its ranks"
        )
    ranges, offset = [], rank_offset
    for name, count in rank_counts.items():
        ranges.append(RankRange(name, count, offset))
        offset += count
    return tuple(ranges)
