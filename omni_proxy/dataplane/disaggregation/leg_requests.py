"""The requests of both legs: the client's body and head lines with each leg's changes.

Invariant: a body is changed by splicing, and only in keys that an engine requires; the rank that a
client names is that of the decode worker. Nothing is sent here.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.dataplane.attempt.attempt import RANK_FIELD
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.task import pause
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.routing.inspect.json_splice import Edits, JsonText, object_at
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, JsonMember, walk_members
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.model_aliases import parts_for_target
from omni_proxy.routing.pinning import BODY_KEY, BODY_ONLY_PATHS, OLD_BODY_KEY
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.header_fields import RANK_HINT
from omni_proxy.wire.request import RequestHead, drop_field, drop_fields
from omni_proxy.wire.scan.head_template import HeadTemplate

_ID: Final = b"x-request-id"
_ENCODING: Final = b"accept-encoding"  # a response that the proxy reads must not be compressed
PREFILL_RANK: Final = "disagg_prefill_dp_rank"  # for SGLang's decode engine


class LegRequests:
    """The legs of one request; `json` is set by `read`."""

    __slots__ = ("_exchange", "_head", "_model", "_spliced", "json", "path", "whole_body")

    def __init__(self, exchange: Exchange, head: RequestHead, json: JsonText | None = None) -> None:
        self.path = path_of(exchange)
        self.whole_body = exchange.body
        self.json = json
        self._exchange = exchange
        self._head = head
        self._model: str | None = None  # the alias target's model that was written into `json`
        self._spliced: tuple[Edits, bytes] | None = None  # the last edits, and their result

    def drop(self) -> None:
        """Release the body, because the request is not sent again and a stream may last long."""
        self.whole_body, self.json, self._spliced = b"", None, None

    async def read(self, io: ExchangeIO) -> JsonText:
        """The client's body; for an alias with the model of the current target. Raises HttpError
        400."""
        need, route = self._exchange.requirements, self._exchange.route
        assert need is not None
        assert route is not None
        model = need.target_model if need.alias is not None and need.alias.spans else None
        if self.json is None or model != self._model:
            body = self.whole_body
            if model is not None:
                body = b"".join(parts_for_target(need, route, body))
            self.json, self._model = await _read_json(io, body), model
        return self.json

    def body(self, edits: Edits) -> bytes:
        """The body after `edits`. The last one is cached: SGLang's legs mostly get the same one."""
        if self._spliced is None or self._spliced[0] is not edits:
            assert self.json is not None
            self._spliced = edits, self.json.splice(edits)
        return self._spliced[1]

    def prefill_body(self, edits: Edits, rank: DpRank | None) -> bytes:
        need = self._exchange.requirements
        return self.body(for_prefill_rank(need, self.path, edits, rank))

    def decode_body(self, edits: Edits) -> bytes:
        exchange = self._exchange
        return self.body(for_rank(exchange.requirements, self.path, edits, exchange.rank))

    def prefill_head(self, connector: str, *, needs_payload: bool, has_ranks: bool) -> RequestHead:
        """`needs_payload`: its response is read. `has_ranks`: some worker of the fleet has
        ranks."""
        lines = self._lines(connector)
        # A rank that the client names is that of the decode worker.
        names_rank = has_ranks and RANK_HINT in self._head.hints
        if names_rank:
            lines = drop_fields(lines, RANK_FIELD | {_ENCODING})
        elif needs_payload:
            lines = without_encoding(lines)
        return self._head_with(lines)

    def decode_head(self, connector: str, *, is_read: bool) -> RequestHead:
        """`is_read`: the proxy reads and changes its response."""
        lines = self._lines(connector)
        return self._head_with(without_encoding(lines) if is_read else lines)

    def _lines(self, connector: str) -> bytes:
        return lines_for_engines(connector, self._head.lines, self._exchange.request_id)

    def _head_with(self, lines: bytes) -> RequestHead:
        head = self._head
        return head if lines is head.lines else msgspec.structs.replace(head, lines=lines)


def path_of(exchange: Exchange) -> str:
    """The path of the request target, without the query."""
    return exchange.target.partition("?")[0]


def for_rank(need: Requirements | None, path: str, edits: Edits, rank: DpRank | None) -> Edits:
    """`edits` with the key that names the rank, for paths where engines ignore the header."""
    if rank is None or need is None or path not in BODY_ONLY_PATHS:
        return edits
    return edits if need.names_rank_in_body else {**edits, BODY_KEY: b"%d" % rank.index}


def for_prefill_rank(
    need: Requirements | None, path: str, edits: Edits, rank: DpRank | None
) -> Edits:
    """`edits` with the prefill rank; the rank that a client names is that of the decode worker."""
    if need is None or not need.names_rank_in_body:
        return for_rank(need, path, edits, rank)
    rank_value = b"%d" % rank.index if rank is not None else None
    return {**edits, BODY_KEY: rank_value, OLD_BODY_KEY: None}


def with_prefill_rank(edits: Edits, rank: DpRank | None) -> Edits:
    """`edits` with the rank of the prefill engine that has the prompt, for SGLang's decode
    engine."""
    return edits if rank is None else {**edits, PREFILL_RANK: b"%d" % rank.index}


def lines_for_engines(connector: str, lines: bytes, request_id: bytes) -> bytes:
    """`lines` with a request id, which vLLM's engines need on both legs: the client's, or else the
    proxy's."""
    if connector == "sglang" or field_value(lines, _ID):
        return lines
    return lines + _id_line(request_id)


def _id_line(request_id: bytes) -> bytes:
    return b"x-request-id: %b\r\n" % request_id


def without_encoding(lines: bytes) -> bytes:
    """`lines` without accept-encoding, for a request whose response is read."""
    return drop_field(lines, _ENCODING)


class EngineLines:
    """`lines_for_engines` and `without_encoding` for heads with one template. Its methods change
    `parts`, the parts of one head, and must be called in their order here."""

    __slots__ = ("_changes", "_has_id")

    def __init__(self, template: HeadTemplate) -> None:
        texts = [template.first, *(after for *_, after in template.steps if after is not None)]
        self._has_id = bool(field_value(b"-".join(texts), _ID))  # "-" stands for a varying value
        ends = [text.lower().rpartition(b"\r\n")[2] for text in texts[:-1]]
        varies = any(end.startswith(_ENCODING + b":") for end in ends)
        # Index and text of the parts that change without accept-encoding; None if it varies.
        self._changes: list[tuple[int, bytes]] | None = None if varies else [
            (2 * number, changed)
            for number, text in enumerate(texts)
            if (changed := without_encoding(text)) != text
        ]  # fmt: skip

    def with_id(self, parts: list[bytes], request_id: bytes) -> bytes:
        """The lines for both legs."""
        if not self._has_id:
            parts.append(_id_line(request_id))
        return b"".join(parts)

    def of_read(self, parts: list[bytes], lines: bytes) -> bytes:
        """`lines`, which are the joined `parts`, for a request whose response is read."""
        if self._changes is None:
            return without_encoding(lines)
        if not self._changes:
            return lines
        for index, changed in self._changes:
            parts[index] = changed
        return b"".join(parts)


async def _read_json(io: ExchangeIO, body: bytes) -> JsonText:
    """Parse the body; a large one in slices. Raises HttpError 400."""
    if len(body) <= ONE_PASS_BYTES:
        return JsonText(body)
    members: list[JsonMember] = []
    for member in walk_members(body, object_at(body)):
        if member is None:
            io.loop.wake(io)
            await pause
        else:
            members.append(member)
    return JsonText(body, members)
