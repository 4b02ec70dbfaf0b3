"""The KV transfer fields of a request body, in the formats of SGLang and vLLM. Pure.

    sglang    bootstrap_host, bootstrap_port, bootstrap_room; lists of them for several prompts
    nixl      kv_transfer_params: returned by the prefill leg, passed on to the decode leg
    mooncake  kv_transfer_params with a transfer_id that both legs have
Invariant: a transfer is either parsed completely or refused; keys of other connectors are ignored,
as in the real engines. A key names one KV and is never used for that of another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from omni_proxy.shared.engine_protocol import BOOTSTRAP_ROOMS, DEFAULT_BOOTSTRAP_PORT, KvConnector
from omni_proxy.shared.origins import MAX_PORT

Role = Literal["null", "prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
CONNECTORS: Final[tuple[KvConnector, ...]] = get_args(KvConnector)

PARAMS: Final = "kv_transfer_params"
MAX_NAME_CHARS: Final = 255
# SGLang's message for a request that was not prepared by a router.
NO_ROOM = (
    "Disaggregated request received without bootstrap room id: send it through a router, which "
    "puts bootstrap_host, bootstrap_port and bootstrap_room into it"
)


class InvalidTransfer(ValueError):
    """The request's fields for the transfer are invalid; the message says how to fix them."""


class Serve(Struct, frozen=True, tag="serve"):
    """Prefill: serve the prompt's KV to the replica that requests `key`.

    With an empty key, the response contains a generated one. With `waits`, the prompt is computed
    only after decode has connected, and the request is answered only after decode has the KV.
    """

    key: str = ""
    waits: bool = False


class Fetch(Struct, frozen=True, tag="fetch"):
    """Decode: fetch the KV `key` from a prefill replica.

    `engine_id` is the engine that must have the KV, "" for any. Requests of one `group` share one
    transfer.
    """

    host: str
    port: int
    key: str
    engine_id: str = ""
    group: str = ""


TransferSpec: TypeAlias = Serve | Fetch


def room_key(room: int) -> str:
    return f"room:{room}"


def transfer_key(transfer_id: str) -> str:
    return f"transfer:{transfer_id}"


def kept_key(handle: str) -> str:
    return f"kept:{handle}"


@dataclass(frozen=True, slots=True)
class TransferFields:
    """Reads the fields for a replica with this role; `port` replaces a port that is null."""

    role: Role = "null"
    connector: KvConnector = "sglang"
    port: int = DEFAULT_BOOTSTRAP_PORT

    def specs(
        self, fields: Mapping[str, Any], group: str, count: int, prompts: int = 1
    ) -> list[TransferSpec | None]:
        """The transfer of each of the `count` requests of a body with `prompts` prompts.

        Raises InvalidTransfer.
        """
        if self.role == "null":
            return [None] * count
        if self.connector == "sglang":
            return [*self._rooms(fields, count)]
        spec = self._from_params(fields.get(PARAMS), group)
        if spec is None:
            return [None] * count
        if prompts > 1 and spec == Serve():
            return [None] * count  # the response has room for one KV only: decode computes them
        if prompts > 1:
            raise InvalidTransfer(f"{PARAMS} is for one prompt, not for {prompts}: send one each")
        # The choices of one prompt have one KV: prefill serves it once, decode's choices share it.
        return [spec] * count if isinstance(spec, Fetch) else [spec, *[None] * (count - 1)]

    def _rooms(self, fields: Mapping[str, Any], count: int) -> list[TransferSpec]:
        rooms = fields.get("bootstrap_room")
        if rooms is None:
            raise InvalidTransfer(NO_ROOM)
        if isinstance(rooms, int) and not isinstance(rooms, bool):
            rooms = [rooms + index for index in range(count)]
        if not isinstance(rooms, list) or len(rooms) != count:
            raise InvalidTransfer(f"bootstrap_room must be a room, or a list of {count} rooms")
        for room in rooms:
            if type(room) is not int or not 0 <= room < BOOTSTRAP_ROOMS:
                raise InvalidTransfer(
                    f"bootstrap_room must be within 0 and 2**63 - 1: {room!r:.40}"
                )
        if len(set(rooms)) < count:
            raise InvalidTransfer("bootstrap_room has duplicates: each prompt needs its own room")
        keys = [room_key(room) for room in rooms]
        if self.role == "prefill":
            return [Serve(key, waits=True) for key in keys]
        hosts = _listed(fields.get("bootstrap_host"), count, "bootstrap_host")
        ports = _listed(fields.get("bootstrap_port"), count, "bootstrap_port")
        return [
            Fetch(_host(host, "bootstrap_host"), self._port(port), key, group=key)
            for host, port, key in zip(hosts, ports, keys, strict=True)
        ]

    def _port(self, port: Any) -> int:
        return self.port if port is None else _port(port, "bootstrap_port")

    def _from_params(self, params: Any, group: str) -> TransferSpec | None:
        if params is None:
            return None
        if not isinstance(params, dict):
            raise InvalidTransfer(f"{PARAMS} must be an object, not {params!r:.40}")
        serves, fetches = params.get("do_remote_decode"), params.get("do_remote_prefill")
        if self.role == "prefill":
            if fetches:
                raise InvalidTransfer(
                    f"{PARAMS}.do_remote_prefill is for a decode replica; this one is prefill"
                )
            return self._serve(params) if serves else None
        return self._fetch(params, group) if fetches else None

    def _serve(self, params: Mapping[str, Any]) -> Serve:
        if self.connector == "nixl":
            return Serve()
        return Serve(transfer_key(_name(params, "transfer_id")))

    def _fetch(self, params: Mapping[str, Any], group: str) -> Fetch:
        engine = _name(params, "remote_engine_id")
        if self.connector == "mooncake":
            host, port = _address(_name(params, "remote_bootstrap_addr"))
            key = transfer_key(_name(params, "transfer_id"))
        else:
            host = _host(params.get("remote_host"), f"{PARAMS}.remote_host")
            port = _port(params.get("remote_port"), f"{PARAMS}.remote_port")
            key = kept_key(_name(params, "remote_request_id"))
        return Fetch(host, port, key, engine, f"{group} {key}")


def nixl_params(
    handle: str, engine_id: str, address: tuple[str, int], blocks: int
) -> dict[str, Any]:
    """The `kv_transfer_params` of a prefill leg's response, in NIXL's keys."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": handle,
        "remote_block_ids": list(range(blocks)),
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": 1,
    }


def to_params(spec: TransferSpec) -> dict[str, Any]:
    """Convert to parameters of a stage, which can be encoded as msgpack."""
    params: dict[str, Any] = msgspec.to_builtins(spec)
    return params


def from_params(params: Any) -> TransferSpec:
    """Raises msgspec.ValidationError."""
    spec: TransferSpec = msgspec.convert(params, TransferSpec)
    return spec


def _listed(value: Any, count: int, name: str) -> list[Any]:
    """One value for each request: the given list, or the same value for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidTransfer(f"{name} has {len(value)} elements, and there are {count} prompts")
    return value


def _host(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise InvalidTransfer(f"{name} must be the prefill replica's host, not {value!r:.40}")
    return value.removeprefix("[").removesuffix("]")


def _port(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_PORT:
        raise InvalidTransfer(f"{name} must be a port, not {value!r:.40}")
    return value


def _name(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise InvalidTransfer(
            f"{PARAMS}.{key} must be a string of at most {MAX_NAME_CHARS} characters, "
            f"not {value!r:.40}"
        )
    return value


def _address(url: str) -> tuple[str, int]:
    problem = f"{PARAMS}.remote_bootstrap_addr must be http://HOST:PORT, not {url!r:.80}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidTransfer(problem) from None
    if parts.scheme != "http" or not host or not port:
        raise InvalidTransfer(problem)
    return host, port
