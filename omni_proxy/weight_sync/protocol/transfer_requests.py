"""Parses the bodies of vLLM's weight transfer before anything is forwarded. Pure.

`init_info` and `update_info` belong to the backend of the engines (nccl, ipc, sparse_nccl, m2n and
others) and are opaque here, but for the ranks: each worker gets a `rank_offset` of its own, and of
a list that has an entry for each rank it gets its own part (features.md 3.2). Invariant: a body
that parses here is not malformed in a way that could hang a member. Errors are GroupError, with a
message for the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from omni_proxy.process_group.rendezvous import Rendezvous, validated_address
from omni_proxy.process_group.tensor_plan import ITEM_BYTES, GroupError
from omni_proxy.weight_sync.protocol.requests import RankRange

# vLLM's groups have no names on the wire: the one of its trainer is this one here.
TRANSFER_GROUP: Final = "vllm weight transfer"
LISTS: Final = ("names", "dtype_names", "shapes")


@dataclass(frozen=True, slots=True)
class TransferInit:
    """`info`: the trainer's init_info. `address`: of its store; None where ranks meet elsewhere.

    `rank_offset` and `world_size` are None for a backend without ranks, such as ipc. `force` takes
    the fleet over from a trainer that is alive.
    """

    info: Mapping[str, Any]
    address: tuple[str, int] | None
    rank_offset: int | None
    world_size: int | None
    force: bool = False

    @property
    def shown_address(self) -> str:
        """For messages."""
        if self.address is None:
            return "no address"
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def body_for(self, rank_offset: int) -> bytes:
        """The init call of the member whose ranks begin there."""
        fields = {"rank_offset": rank_offset, "world_size": self.world_size}
        ranks = {} if self.rank_offset is None else fields
        return json.dumps({"init_info": {**self.info, **ranks}}).encode()


@dataclass(frozen=True, slots=True)
class TransferUpdate:
    """One chunk. `parts`: what each rank gets, None where all get the same."""

    body: bytes
    parts: tuple[Any, ...] | None
    names: frozenset[str]
    nbytes: int

    def body_for(self, ranks: RankRange, first_rank: int) -> bytes:
        """The update call of the member with these ranks; the fleet's begin at `first_rank`."""
        if self.parts is None:
            return self.body
        begin = ranks.offset - first_rank
        return json.dumps({"update_info": self.parts[begin : begin + ranks.ranks]}).encode()


def parse_transfer_init(body: Mapping[str, Any]) -> TransferInit:
    """Raises GroupError, also for ranks that are out of range in any group."""
    info = body.get("init_info")
    if not isinstance(info, dict):
        raise GroupError(
            "body.init_info is missing: an object with what the backend of the engines needs, for "
            "nccl master_address, master_port, rank_offset and world_size"
        )
    offset, world = (_whole(info, key) for key in ("rank_offset", "world_size"))
    if (offset is None) is not (world is None):
        raise GroupError("init_info needs both rank_offset and world_size, or neither")
    address = None
    if info.get("master_address") is not None or info.get("master_port") is not None:
        # The rank is validated with the ranks of all members, where the error can show the numbers.
        host, port = info.get("master_address"), info.get("master_port")
        address = validated_address(
            Rendezvous(_text(host), _port(port), 1, max(world or 2, 2), TRANSFER_GROUP)
        )
    force = body.get("force") is True
    return TransferInit(info, address, offset, world, force)


def parse_transfer_update(raw: bytes, body: Mapping[str, Any], ranks: int) -> TransferUpdate:
    """`ranks`: how many there are behind this endpoint. Raises GroupError."""
    info = body.get("update_info")
    if not isinstance(info, dict | list):
        raise GroupError("body.update_info is missing: an object, or a list with one for each rank")
    parts = tuple(info) if isinstance(info, list) else None
    if parts is not None and len(parts) != ranks:
        raise GroupError(
            f"update_info is a list of {len(parts)}, and there are {ranks} ranks behind this "
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
    """The label of the version, None where the trainer names none. Raises GroupError."""
    label = body.get("weight_version")
    if label is not None and not isinstance(label, str):
        raise GroupError(f"weight_version must be a string or null, not {label!r}")
    return label


def _announced(info: object) -> tuple[set[str], int]:
    """Names and bytes of the tensors, as far as the backend announces them. Raises GroupError."""
    if not isinstance(info, dict):
        raise GroupError("each entry of update_info must be an object")
    lists = {key: info[key] for key in LISTS if isinstance(info.get(key), list)}
    if len({len(values) for values in lists.values()}) > 1:
        sizes = ", ".join(f"{len(values)} {key}" for key, values in lists.items())
        raise GroupError(f"update_info needs as many names as dtype_names and shapes, not {sizes}")
    names = {str(name) for name in lists.get("names", ())}
    return names, _bytes_of(lists.get("dtype_names", ()), lists.get("shapes", ()))


def _bytes_of(dtypes: Sequence[object], shapes: Sequence[object]) -> int:
    """For the metrics; a tensor of a type or shape that is not known counts nothing."""
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _port(value: object) -> int | str:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else 0
