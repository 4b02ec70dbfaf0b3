"""SGLang's bootstrap protocol: both legs at once, one room for each prompt.

Both engines get the client's body with the address of the prefill engine's bootstrap server and a
room that no other request has; the prefill engine waits there until the decode engine connects, so
the legs must run at the same time. `rid` is ours, of fixed width: engines abort by prefix, and two
clients may use one id. Invariant: nothing else of the body changes. Source: features.md 2.1, 2.7.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import msgspec

from omni_proxy.routing.inspect.body_fields import is_list, is_truthy, read_elements, read_value
from omni_proxy.routing.inspect.json_splice import Edits, JsonText
from omni_proxy.routing.policies.policy import RandomBelow
from omni_proxy.wire.errors import HttpError

ROOMS: Final = 2**63  # rooms are 0 to ROOMS - 1
RID_BITS: Final = 128
RID_CHARS: Final = RID_BITS // 4
ROOM_BITS: Final = 63
_ROOM_MASK: Final = ROOMS - 1
# One less than there are: a bound of one bit more would throw every other draw away.
MOST_DRAWN: Final = 2 ** (RID_BITS + ROOM_BITS) - 1
_KEYS: Final = b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%b,"rid":%b'
# Keys whose list of prompts makes a batch, by path; a list of numbers is one prompt.
_BATCH_KEYS: Final = {"/generate": ("input_ids", "text"), "/v1/completions": ("prompt",)}
CHAT: Final = "/v1/chat/completions"
_MAX_COUNT_CHARS: Final = 64
MAX_CHOICES: Final = 16384  # of a chat; each makes the lists of both bodies longer


class SglangLegs(msgspec.Struct, frozen=True):
    """The changes of both bodies; `text`: of all keys that they set. `rid`: the engines' name of
    the request; in a batch they have `rid` with `_0`, `_1`, ... `client_rid`: the client's own as
    JSON, b"" without one. `merges_logprobs`: the answer needs the prompt's log probabilities, which
    prefill has."""

    prefill: Edits
    decode: Edits
    text: bytes
    rid: str
    client_rid: bytes
    merges_logprobs: bool


def batch_size(path: str, body: JsonText) -> int | None:
    """How many prompts, or choices of a chat, the request has; None if it is no batch. Raises
    HttpError 400."""
    for key in _BATCH_KEYS.get(path, ()):
        text = body.value(key)
        prompts = read_elements(msgspec.Raw(text)) if text.startswith(b"[") else ()
        if prompts and (key == "text" or not _is_number(prompts[0])):
            return len(prompts)
    text = body.value("n") if path == CHAT else b""
    choices = _count(read_value(msgspec.Raw(text))) if text else 1
    if choices <= 1:
        return None
    if choices > MAX_CHOICES:
        message = f"n is {choices}; a chat has at most {MAX_CHOICES} choices"
        raise HttpError(400, message, "invalid_request")
    return choices


def _count(value: object) -> int:
    """As the engine reads an integer: 2.0 and "2" are one, too. 1 for whatever it refuses."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value) if len(value) <= _MAX_COUNT_CHARS else MAX_CHOICES + 1
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else 1


def _is_number(raw: msgspec.Raw) -> bool:
    return memoryview(raw)[0] in b"-0123456789"


def port_text(port: int | None) -> bytes:
    return b"null" if port is None else b"%d" % port


def sglang_legs(
    path: str, body: JsonText, prefill_url: str, port: int | None, random_below: RandomBelow
) -> SglangLegs:
    """`port`: of the prefill engine's bootstrap server, None while unknown. Raises HttpError 400
    for a key that is there twice, and as `batch_size`."""
    size = batch_size(path, body)
    number = random_below(MOST_DRAWN)  # one draw costs half of two
    host, rid = bootstrap_host(prefill_url), f"{number >> ROOM_BITS:0{RID_CHARS}x}"
    hosts, ports = json_text(host), port_text(port)
    rids = b'"%b"' % rid.encode()
    if size is None:
        rooms = b"%d" % (number & _ROOM_MASK)
    else:
        hosts, ports = _repeated(hosts, size), _repeated(ports, size)
        rooms = b"[%b]" % b",".join(b"%d" % random_below(ROOMS) for _ in range(size))
        if path != CHAT:  # choices of a chat share its one id
            rids = b"[%b]" % b",".join(b'"%b_%d"' % (rid.encode(), n) for n in range(size))
    edits = {
        "bootstrap_host": hosts, "bootstrap_port": ports, "bootstrap_room": rooms, "rid": rids,
    }  # fmt: skip
    client_rid = body.value("rid")
    wants_logprobs = path == "/generate" and _wants(body.value("return_logprob"))
    given = client_rid if client_rid != b"null" else b""
    text = _KEYS % (hosts, ports, rooms, rids)
    return SglangLegs(edits, edits, text, rid, given, wants_logprobs)


@lru_cache(maxsize=4096)
def json_text(text: str) -> bytes:
    return msgspec.json.encode(text)


def _repeated(text: bytes, size: int) -> bytes:
    return b"[%b]" % b",".join([text] * size)


def _wants(flag: bytes) -> bool:
    """Of a batch it may be a list."""
    raw = msgspec.Raw(flag)
    return any(map(is_truthy, read_elements(raw))) if is_list(raw) else is_truthy(raw)


@lru_cache(maxsize=4096)
def bootstrap_host(url: str) -> str:
    """The host of a worker's URL, an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def abort_body(rid: str) -> bytes:
    """Of `POST /abort_request`: all prompts of the request, which have it as their prefix."""
    return json.dumps({"rid": rid}).encode()
