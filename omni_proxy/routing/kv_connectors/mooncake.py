"""vLLM's Mooncake protocol: both legs run at the same time, joined by a transfer id.

The decode leg contains the address of the prefill engine's bootstrap server, and the engine's id,
which `GET /query` there returns and which changes when the engine restarts.
Source: note:features 2.3, 2.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.json_splice import Edits, JsonText
from omni_proxy.routing.kv_connectors import nixl
from omni_proxy.routing.kv_connectors.sglang import bootstrap_host
from omni_proxy.routing.policies.policy import RandomBelow
from omni_proxy.shared.decoding import MALFORMED

QUERY: Final = "/query"
MAX_ENGINES: Final = 4096  # whose ids are kept
MAX_QUERY_BYTES: Final = 1024 * 1024
# 2**128 - 1 instead of 2**128: for a bound one bit longer, half of the draws would be rejected.
_MAX_DRAWN: Final = 2**128 - 1
_REMOTE_DECODE: Final = b'{"do_remote_decode":true,"do_remote_prefill":false,'


class MooncakeLegs(msgspec.Struct, frozen=True):
    """The changes of both bodies."""

    prefill: Edits
    decode: Edits


def mooncake_legs(
    path: str, body: JsonText, address: str, engine_id: str, random_below: RandomBelow
) -> MooncakeLegs:
    """`address`: URL of the prefill engine's bootstrap server. Raises HttpError 400 for a duplicate
    key."""
    prefill, decode = transfer_params(address, engine_id, random_below)
    return MooncakeLegs(nixl.prefill_edits(path, body, prefill), nixl.decode_edits(decode))


def transfer_params(address: str, engine_id: str, random_below: RandomBelow) -> tuple[bytes, bytes]:
    """`kv_transfer_params` of the prefill and the decode leg; arguments as for `mooncake_legs`."""
    text = b"%032x" % random_below(_MAX_DRAWN)
    uuid = text[:8], text[8:12], text[12:16], text[16:20], text[20:]  # groups of a UUID
    transfer_id = b'"transfer_id":"xfer-%b-%b-%b-%b-%b"}' % uuid
    return _REMOTE_DECODE + transfer_id, _remote_prefill(address, engine_id) + transfer_id


@lru_cache(maxsize=MAX_ENGINES)
def _remote_prefill(address: str, engine_id: str) -> bytes:
    encode = msgspec.json.encode
    return b"%b%b," % (
        b'{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":',
        b'%b,"remote_engine_id":%b' % (encode(address), encode(engine_id)),
    )


@lru_cache(maxsize=MAX_ENGINES)
def bootstrap_address(url: str, port: int) -> str:
    return f"http://{bootstrap_host(url)}:{port}"


def read_engine_ids(answer: bytes) -> dict[int, str]:
    """Engine ids in a reply to `GET /query`, by data-parallel rank; empty if it is invalid."""
    try:
        ranks: Any = msgspec.json.decode(answer)
    except MALFORMED:
        return {}
    entries = ranks.items() if isinstance(ranks, dict) else ()
    return {
        int(rank): entry["engine_id"]
        for rank, entry in entries
        if rank.isascii()
        and rank.isdecimal()
        and isinstance(entry, dict)
        and isinstance(entry.get("engine_id"), str)
    }


_NONE: Final[Mapping[int, str]] = {}


class EngineIds:
    """Engine ids that prefill workers returned from `GET /query`, each valid for one process."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Mapping[int, str]]] = {}

    def find(self, worker: Worker, rank: int = 0) -> str | None:
        """None if it has to be queried: it was never queried, restarted, or removed on failure."""
        instance, engine_ids = self._known.get(worker.url, ("", _NONE))
        return engine_ids.get(rank) if instance == worker.instance else None

    def transfer(
        self, worker: Worker, rank: int, random_below: RandomBelow
    ) -> tuple[bytes, bytes] | None:
        """Like `transfer_params`; None if `find` returns None."""
        entry = self._known.get(worker.url)
        if entry is None or entry[0] != worker.instance or rank not in entry[1]:
            return None
        address = bootstrap_address(worker.url, worker.bootstrap_port or 0)
        return transfer_params(address, entry[1][rank], random_below)

    def keep(self, worker: Worker, engine_ids: Mapping[int, str]) -> None:
        """`engine_ids`: by data-parallel rank."""
        if len(self._known) >= MAX_ENGINES:
            self._known.clear()
        self._known[worker.url] = (worker.instance, engine_ids)

    def forget(self, worker: Worker) -> None:
        self._known.pop(worker.url, None)
