"""The route table: the paths of model traffic, and the requirements of each on a worker.

There is no catch-all: requests for a path in this table, or in [[routes]] of the configuration, go
to a worker, all others to the admin API. Source: note:omni-router 4, 7 and 12; note:features 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from omni_proxy.config.schema import RouteEntry
from omni_proxy.fleet.worker import capability_mask, counter_offset
from omni_proxy.wire.errors import HttpError


class BodyKind(Enum):
    """How the inspection reads a body."""

    JSON = "json"  # only if the content type is JSON
    ALWAYS_JSON = "always_json"
    FORM = "form"
    OPAQUE = "opaque"


# In Python 3.11 the look-up of an enum's member is much slower than that of a module's name.
JSON, ALWAYS_JSON, FORM, OPAQUE = BodyKind


class Pinning(Enum):
    """How a route is bound to one worker, instead of a choice by the policy."""

    ANY = "any"
    VOICE_OWNER = "voice_owner"
    NAMED = "named"  # by the header x-sglang-omni-route-worker
    RESPONSE_OWNER = "response_owner"  # see `routing.stored_responses`


UNPINNED, VOICE_OWNER, NAMED, RESPONSE_OWNER = Pinning


@dataclass(frozen=True, slots=True)
class Legs:
    """How prefill and decode workers serve the requests of a route. `connectors`: those with which
    requests are served in two legs. `alone`: those with which a decode worker can serve whole
    requests, if [routing.disaggregation] allows it. `no_model`: the requests need no model, so that
    a decode worker can always serve them."""

    connectors: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()
    no_model: bool = False


_VLLM = frozenset(("nixl", "mooncake"))
NO_LEGS = Legs()
BOTH_ENGINES = Legs(_VLLM | {"sglang"}, _VLLM)
SGLANG_ONLY = Legs(frozenset(("sglang",)), _VLLM)
VLLM_ONLY = Legs(_VLLM, _VLLM)
DECODE_ALONE = Legs(alone=_VLLM)  # requests of the route have no field for the KV transfer
NO_MODEL = Legs(no_model=True)


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `traffic`: class of its counters (note:omni-router 3), which begin at
    `counter_index`. `text`: keys of the body whose content is the prefix text, if they differ from
    those that `prefix_text` reads by default."""

    path: str
    methods: frozenset[str]
    traffic: str
    mask: int
    body_kind: BodyKind
    pinning: Pinning = Pinning.ANY
    websocket: bool = False
    text: tuple[str, ...] = ()
    legs: Legs = NO_LEGS
    counter_index: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counter_index", counter_offset(self.traffic))


def _row(path: str, traffic: str, needs: str, body: BodyKind, **options: object) -> Route:
    methods = options.pop("methods", "POST")
    return Route(
        path,
        frozenset(str(methods).split()),
        traffic,
        capability_mask([needs]),
        body,
        **options,  # type: ignore[arg-type]
    )


_ROWS = (
    _row("/v1/chat/completions", "generation", "chat", BodyKind.JSON, legs=BOTH_ENGINES),
    _row("/v1/completions", "generation", "chat", BodyKind.JSON, legs=BOTH_ENGINES),
    _row("/v1/embeddings", "generation", "chat", BodyKind.JSON),
    _row("/generate", "generation", "chat", BodyKind.JSON, legs=SGLANG_ONLY),
    _row("/inference/v1/generate", "generation", "chat", BodyKind.JSON, legs=VLLM_ONLY),
    _row("/v1/messages", "generation", "chat", BodyKind.JSON, legs=DECODE_ALONE),
    _row("/v1/chat/completions/batch", "generation", "chat", BodyKind.JSON, legs=DECODE_ALONE),
    _row(
        "/v1/responses", "responses", "chat", BodyKind.JSON,
        pinning=Pinning.RESPONSE_OWNER, text=("instructions", "input"), legs=VLLM_ONLY,
    ),
    *(
        _row(path, "auxiliary", "chat", BodyKind.JSON, legs=NO_MODEL)
        for path in (
            "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
            "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render",
            "/v1/responses/render", "/v1/chat/completions/derender", "/v1/completions/derender",
            "/derender", "/v1/messages/count_tokens",
        )
    ),
    *(
        _row(path, "auxiliary", "chat", BodyKind.JSON)
        for path in (
            "/v1/rerank", "/rerank", "/v1/score", "/score", "/v1/classify", "/classify", "/pooling",
        )
    ),
    _row("/v1/images/generations", "images", "chat", BodyKind.JSON),
    _row("/v1/audio/speech", "speech_http", "speech", BodyKind.ALWAYS_JSON),
    _row("/v1/audio/speech/batch", "speech_batch", "speech", BodyKind.ALWAYS_JSON),
    _row("/v1/audio/transcriptions", "transcription", "audio_input", BodyKind.FORM),
    _row("/v1/audio/translations", "transcription", "audio_input", BodyKind.FORM),
    _row(
        "/v1/audio/voices", "voice_control", "speech", BodyKind.OPAQUE,
        methods="GET POST", pinning=Pinning.VOICE_OWNER,
    ),
)  # fmt: skip
_EXACT = {row.path: row for row in _ROWS}
_SPEECH_STREAM = Route(
    "/v1/audio/speech/stream", frozenset(("GET",)), "tts_websocket",
    capability_mask(["speech", "streaming"]), BodyKind.OPAQUE, websocket=True,
)  # fmt: skip
_OUTCOME = Route(
    "/v1/audio/speech/{request_id}", frozenset(("GET",)), "speech_outcome",
    capability_mask(["speech"]), BodyKind.OPAQUE, Pinning.NAMED,
)  # fmt: skip
_VOICE = Route(
    "/v1/audio/voices/{name}", frozenset(("DELETE",)), "voice_control",
    capability_mask(["speech"]), BodyKind.OPAQUE, Pinning.VOICE_OWNER,
)  # fmt: skip
_RESPONSE = Route(
    "/v1/responses/{response_id}", frozenset(("GET", "DELETE")), "responses",
    capability_mask(["chat"]), BodyKind.OPAQUE, Pinning.RESPONSE_OWNER, legs=NO_MODEL,
)  # fmt: skip
_CANCEL = Route(
    "/v1/responses/{response_id}/cancel", frozenset(("POST",)), "responses",
    capability_mask(["chat"]), BodyKind.OPAQUE, Pinning.RESPONSE_OWNER, legs=NO_MODEL,
)  # fmt: skip
_EXACT[_SPEECH_STREAM.path] = _SPEECH_STREAM
MODEL_PATHS = tuple(_EXACT)  # paths without parameters
DEFAULT_PATH = "/v1/chat/completions"  # of explanations and selections that name none
ALL_ROUTES = (*_EXACT.values(), _OUTCOME, _VOICE, _RESPONSE, _CANCEL)


class MethodNotAllowed(Exception):
    """The path is a model route that doesn't have the method."""

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__("Method Not Allowed")
        self.allowed = allowed

    def as_http_error(self, *, close: bool = False) -> HttpError:
        """The 405. `close`: a body has not been read."""
        allowed = ", ".join(sorted(self.allowed))
        return HttpError(
            405, f"this path accepts only {allowed}", "method_not_allowed",
            close=close, detail=str(self),
        ).with_headers(("allow", allowed))  # fmt: skip


def match_route(method: str, path: str) -> Route | None:
    """The built-in model route of a path, None for any other path. Raises MethodNotAllowed."""
    row = _EXACT.get(path)
    if row is None:
        row = (
            _one_segment_below(path, "/v1/audio/speech/", _OUTCOME)
            or _one_segment_below(path, "/v1/audio/voices/", _VOICE)
            or _one_segment_below(path, "/v1/responses/", _RESPONSE)
            or _one_segment_below(path.removesuffix("/cancel"), "/v1/responses/", _CANCEL)
        )
    if row is None:
        return None
    if method not in row.methods:
        raise MethodNotAllowed(row.methods)
    return row


ConfiguredRoutes = Mapping[str, Route]


def configured_routes(entries: Iterable[RouteEntry]) -> ConfiguredRoutes:
    """Configured routes by path. Their traffic class is `configured`; requests are inspected and
    routed like chat requests."""
    return {
        entry.path: Route(
            entry.path, frozenset(entry.methods), "configured",
            capability_mask([entry.capability]), BodyKind.JSON, text=entry.text,
        )
        for entry in entries
    }  # fmt: skip


def find_route(configured: ConfiguredRoutes, method: str, path: str) -> Route | None:
    """The model route of a path, built-in or else configured; None for any other path. Raises
    MethodNotAllowed."""
    route = match_route(method, path)
    if route is not None:
        return route
    row = configured.get(path)
    if row is not None and method not in row.methods:
        raise MethodNotAllowed(row.methods)
    return row


def _one_segment_below(path: str, stem: str, row: Route) -> Route | None:
    rest = path[len(stem) :] if path.startswith(stem) else ""
    return row if rest and "/" not in rest else None
