"""vLLM's Mooncake protocol: both legs at once, joined by an id of the transfer.

The decode engine is told the bootstrap server of the prefill engine and that engine's id, which
`GET /query` there names; it changes when the engine restarts. Source: features.md 2.3, 2.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.json_splice import Edits, JsonText
from omni_proxy.routing.kv_transfer import nixl
from omni_proxy.routing.kv_transfer.sglang import bootstrap_host
from omni_proxy.routing.policies.policy import RandomBelow

QUERY: Final = "/query"
MAX_ENGINES: Final = 4096  # known at a time
MAX_QUERY_BYTES: Final = 1024 * 1024


class MooncakeLegs(msgspec.Struct, frozen=True):
    """The changes of both bodies."""

    prefill: Edits
    decode: Edits


def mooncake_legs(
    path: str, body: JsonText, address: str, engine_id: str, random_below: RandomBelow
) -> MooncakeLegs:
    """`address`: of the prefill engine's bootstrap server, with `http://`. Raises HttpError 400 for
    a key that is there twice."""
    transfer_id = f"xfer-{_uuid(random_below(2**128))}"
    prefill = {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id,
    }  # fmt: skip
    decode = {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": address,
        "remote_engine_id": engine_id, "transfer_id": transfer_id,
    }  # fmt: skip
    edits = nixl.prefill_edits(path, body, msgspec.json.encode(prefill))
    return MooncakeLegs(edits, nixl.decode_edits(msgspec.json.encode(decode)))


def _uuid(number: int) -> str:
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def bootstrap_address(url: str, port: int) -> str:
    return f"http://{bootstrap_host(url)}:{port}"


def read_engine_ids(answer: bytes) -> dict[int, str]:
    """Of an answer to `GET /query`, by data-parallel rank; empty if it is none."""
    try:
        ranks: Any = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
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
    """What prefill workers have answered to `GET /query`, for each of their processes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Mapping[int, str]]] = {}

    def find(self, worker: Worker, rank: int = 0) -> str | None:
        """None if it has to be asked: never asked, restarted, or forgotten after a failure."""
        instance, engine_ids = self._known.get(worker.url, ("", _NONE))
        return engine_ids.get(rank) if instance == worker.instance else None

    def keep(self, worker: Worker, engine_ids: Mapping[int, str]) -> None:
        """`engine_ids`: by data-parallel rank."""
        if len(self._known) >= MAX_ENGINES:
            self._known.clear()
        self._known[worker.url] = (worker.instance, engine_ids)

    def forget(self, worker: Worker) -> None:
        self._known.pop(worker.url, None)
