"""The requirements of a request on a worker, from its body and hint headers (note:omni-router 7).

Invariant: the same body and hints give the same `Requirements`; the body is decoded only for
reading and forwarded byte for byte. A body that is not JSON where JSON is required is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec

from omni_proxy.fleet.worker import CAPABILITY_BITS, capability_mask, capability_names
from omni_proxy.routing.cache_prediction import CachePrediction
from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    MAX_REQUEST_ID_CHARS,
    BodyFields,
    ObjectListReader,
    RoutedFields,
    body_fields_of,
    decode_body,
    form_fields,
    is_truthy,
    read_adapters,
    read_elements,
    read_rids,
    read_text,
    starts_with,
)
from omni_proxy.routing.inspect.large_json import LARGE_BYTES, LargeJsonFields, read_large_json
from omni_proxy.routing.routes import (
    ALWAYS_JSON,
    FORM,
    JSON,
    NAMED,
    NO_LEGS,
    UNPINNED,
    Legs,
    Pinning,
    Route,
)
from omni_proxy.routing.version_constraint import VersionConstraint, parse_version_constraint
from omni_proxy.routing.weighted_split import AliasRequirement
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.errors import bad_request
from omni_proxy.wire.header_fields import HINT_PREFIX_TEXT

STREAMING, IMAGE, AUDIO, VIDEO, AUDIO_OUT = (
    CAPABILITY_BITS[name]
    for name in ("streaming", "image_input", "audio_input", "video_input", "audio_output")
)
MEDIA: Final = IMAGE | AUDIO | VIDEO
_KINDS: dict[str | None, int] = {
    "image": IMAGE, "image_url": IMAGE, "input_image": IMAGE,
    "audio": AUDIO, "audio_url": AUDIO, "input_audio": AUDIO,
    "video": VIDEO, "video_url": VIDEO, "input_video": VIDEO,
}  # fmt: skip
_SPELLED = {f'"{kind}"'.encode(): bit for kind, bit in _KINDS.items()}


class HeadFacts(Protocol):
    """The fields of a request's head that routing reads. Hints are keyed without their prefix."""

    @property
    def content_type(self) -> bytes: ...
    @property
    def hints(self) -> dict[bytes, bytes]: ...


class VoiceReferenceFields(Protocol):
    """The body of a speech request, or an item of it."""

    ref_audio: msgspec.Raw
    references: msgspec.Raw


@dataclass(slots=True)
class RequestFacts:
    """`HeadFacts` for a request without its own head."""

    content_type: bytes = b""
    hints: dict[bytes, bytes] = field(default_factory=dict)


ANY_RANK: Final = -1


class Requirements(msgspec.Struct, gc=False):
    """What a worker needs to serve the request: model, capability bits, perhaps its identity."""

    mask: int
    model: str | None = None
    stream: bool = False
    request_id: str = ""
    pinning: Pinning = UNPINNED
    named_worker: str = ""  # id or URL, for Pinning.NAMED
    decoded: RoutedFields | None = None  # what `body_fields` returns, unless `undecoded` is set
    undecoded: bytes = b""  # the body, if it is decoded only when `body_fields` is read
    affinity_key: str = ""  # keeps a session on its worker, for policies that use it
    version_constraint: VersionConstraint | None = None  # which weights it accepts; None: any
    rids: tuple[str, ...] = ()  # ids at the engine, if the body has them (SGLang)
    adapters_in_large_body: frozenset[str] = frozenset()  # in addition to the model (`lora_path`)
    large_body_class: str = ""  # the traffic class of a body that was too large to be read whole
    given_hints: frozenset[bytes] = frozenset()  # with a large body: the keys of its hints
    ranks_in_large_body: tuple[tuple[str, bytes], ...] = ()  # with a large body: keys and values
    dp_rank: int = ANY_RANK  # the data-parallel rank that the client names
    names_rank_in_body: bool = False
    legs: Legs = NO_LEGS  # how prefill and decode workers can serve it
    alias: AliasRequirement | None = None  # if set, `model` is the chosen target's
    # Predicted cache of the latest pick's worker, for policies that compare it with the response.
    prediction: CachePrediction | None = None

    @property
    def body_fields(self) -> BodyFields | None:
        """The fields of the body, for policies that read the prompt."""
        if self.undecoded:
            self.decoded, self.undecoded = decode_body(self.undecoded), b""
        return self.decoded  # type: ignore[return-value]

    @body_fields.setter
    def body_fields(self, fields: BodyFields | None) -> None:
        self.decoded, self.undecoded = fields, b""

    @property
    def asked_model(self) -> str | None:
        """The model or alias in the request."""
        return self.model if self.alias is None else self.alias.split.name

    @property
    def target_model(self) -> str | None:
        """The model of an alias's target in the present or last attempt; None without an alias."""
        return None if self.alias is None else self.alias.model

    @property
    def capabilities(self) -> list[str]:
        return capability_names(self.mask)


MAX_MODEL_CHARS = 1024
# Rare fields, and the capabilities that they require; `rid` is checked together with them.
_RARE = {
    "image": IMAGE, "images": IMAGE, "audios": AUDIO, "audio_inputs": AUDIO,
    "video": VIDEO, "videos": VIDEO, "audio": AUDIO_OUT, "modalities": 0,
    "output_modalities": 0, "rid": 0,
}  # fmt: skip
_rare_values = attrgetter(*_RARE)
_ids_left_out = attrgetter(*(name for name in _RARE if name != "rid"))
_NO_MEDIA = (None,) * (len(_RARE) - 1)


class _PlainPart(msgspec.Struct, gc=False):
    type: str | None = None


class _PlainMessage(msgspec.Struct, gc=False):
    """A message in the usual form: a text, or parts that are objects with a type."""

    content: str | list[_PlainPart] | None = None


class _Part(msgspec.Struct, gc=False):
    """A part of any message's content; also used to read a message."""

    type: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT


class _Reference(msgspec.Struct, gc=False):
    audio_path: msgspec.Raw = ABSENT
    ref_audio: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    data: msgspec.Raw = ABSENT


class _Item(msgspec.Struct, gc=False):
    model: msgspec.Raw = ABSENT


_decode_messages = msgspec.json.Decoder(list[_PlainMessage]).decode
_parts_in = ObjectListReader(_Part, least=len('{"type":"image"}'))
_references_in = ObjectListReader(_Reference, least=len('{"data":1}'))
_items_in = ObjectListReader(_Item, least=len('{"model":"m"}'))


def inspect_request(route: Route, body: bytes, facts: HeadFacts) -> Requirements:
    """Raises HttpError 400: invalid JSON, an invalid hint, or a hint that contradicts the body."""
    if body and has_json_body(route, facts):
        if len(body) > LARGE_BYTES:
            return requirements_of_large_json(route, read_large_json(body), facts)
        requirements = requirements_of_json(route, body)
        if facts.hints:
            _apply_hints(requirements, facts.hints, source="JSON body")
        return requirements
    requirements = Requirements(route.mask, pinning=route.pinning)
    if route.pinning is NAMED:
        worker_id = facts.hints.get(b"worker", b"")
        if not worker_id:
            raise bad_request(f"{HINT_PREFIX_TEXT}worker is required for speech outcome lookups")
        requirements.named_worker = worker_id.decode("latin-1")
    complete = route.body_kind is FORM and _read_form(body, facts.content_type, requirements)
    if facts.hints:
        _apply_hints(requirements, facts.hints, source="multipart form" if complete else None)
    return requirements


def requirements_of_json(route: Route, body: bytes) -> Requirements:
    """The requirements of a small JSON body, which is decoded whole. Raises HttpError 400."""
    return requirements_of_fields(route, decode_body(body))


def requirements_of_hints(route: Route, facts: HeadFacts, model: str | None = None) -> Requirements:
    """The requirements by hints and the body's `model` only. Raises HttpError 400."""
    requirements = Requirements(route.mask, model, pinning=route.pinning)
    if route.traffic.startswith("speech") and has_json_body(route, facts):
        requirements.mask |= AUDIO  # as for any large speech body
    _apply_hints(requirements, facts.hints, source=None)
    if model is not None and requirements.model != model:
        raise bad_request(f"{HINT_PREFIX_TEXT}model conflicts with the multipart form model")
    return requirements


def requirements_of_large_json(
    route: Route, top: LargeJsonFields, facts: HeadFacts
) -> Requirements:
    """The requirements of a large JSON body. Raises HttpError 400."""
    requirements = requirements_of_fields(route, BodyFields(
        model=read_text(top.model), stream=bytes(top.stream) == b"true",
        stream_format=msgspec.Raw(bytes(top.stream_format)),
        request_id=read_text(top.request_id), rid=msgspec.Raw(bytes(top.rid)),
        input_ids=msgspec.Raw(top.beginning),
    ))  # fmt: skip
    if route.traffic.startswith("speech"):
        requirements.mask |= AUDIO  # such a body is large because of a voice reference
    requirements.large_body_class = route.traffic
    requirements.adapters_in_large_body = read_adapters(msgspec.Raw(bytes(top.lora_path)))
    requirements.ranks_in_large_body = tuple(
        (name, bytes(value))
        for name in ("routed_dp_rank", "data_parallel_rank")
        if len(value := getattr(top, name))
    )
    requirements.given_hints = frozenset(facts.hints)
    if facts.hints:
        _apply_hints(requirements, facts.hints, source="JSON body")
    return requirements


def inspect_session(route: Route, first: str | bytes, facts: HeadFacts) -> Requirements:
    """The requirements of a speech session by its first message. One that is not session.config
    adds none; the worker refuses it (note:omni-router 12). Raises HttpError 400 for invalid
    hints."""
    fields = _session_fields(first)
    if fields is None:
        requirements = Requirements(route.mask)
    else:
        payload = body_fields_of(fields)
        requirements = requirements_of_fields(route, payload)
        if has_voice_reference(payload):
            requirements.mask |= AUDIO
    requirements.stream = True
    if facts.hints:
        _apply_hints(requirements, facts.hints, source=None if fields is None else "JSON body")
    return requirements


def _session_fields(first: str | bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(first) if isinstance(first, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("type") != "session.config":
        return None
    session = message.get("session")
    return session if isinstance(session, dict) else message


def has_json_body(route: Route, facts: HeadFacts) -> bool:
    if route.body_kind is not JSON:
        return route.body_kind is ALWAYS_JSON
    complete = facts.content_type
    return complete == b"application/json" or b"json" in complete.lower()


def requirements_of_fields(
    route: Route, payload: RoutedFields, undecoded: bytes = b""
) -> Requirements:
    """The requirements of the fields of a JSON body; for a route of speech, of its `BodyFields`.
    `undecoded`: the body, if `payload` does not have all of its fields. Raises HttpError 400."""
    model, mask, stream = payload.model, route.mask, payload.stream is True
    if not model or not model.isascii() or len(model) > MAX_MODEL_CHARS:
        model, payload.model = _named(model), None
    request_id = payload.request_id
    if request_id is None:
        request_id = ""
    elif len(request_id) > MAX_REQUEST_ID_CHARS:
        request_id, payload.request_id = "", None
    if stream:
        mask |= STREAMING
    spelled = b"".join((payload.messages,))  # `bytes` is slower in CPython 3.11
    if spelled.rfind(b"[") > 0:  # there may be a list of parts
        mask |= _parts(payload.messages, spelled)
    requirements = Requirements(
        mask, model, stream, request_id, route.pinning, "", payload, undecoded
    )
    # Nearly every body has none of these; a comparison each is faster than a tuple of them.
    if (
        payload.rid is not None or payload.modalities is not None or payload.audio is not None
        or payload.image is not None or payload.images is not None
        or payload.audios is not None or payload.audio_inputs is not None
        or payload.video is not None or payload.videos is not None
        or payload.output_modalities is not None
    ):  # fmt: skip
        if _ids_left_out(payload) != _NO_MEDIA:  # SGLang's clients send `rid` without media
            requirements.mask |= _media(payload)
        requirements.rids = read_rids(payload.rid or ABSENT)
    if route.traffic != "generation":
        assert isinstance(payload, BodyFields)
        _read_speech(route, payload, requirements)
    return requirements


def _read_speech(route: Route, payload: BodyFields, requirements: Requirements) -> None:
    if route.traffic == "speech_batch":
        _read_batch(payload, requirements)
    if route.traffic == "speech_http" and read_text(payload.stream_format) == "sse":
        requirements.mask |= STREAMING
    if route.traffic.startswith("speech") and has_voice_reference(payload):
        requirements.mask |= AUDIO


def _named(model: str | None) -> str | None:
    """The model's name without lone surrogates, which logs and responses can't contain.

    A too long name is truncated: no worker serves it, and logs and responses would repeat it.
    """
    if not model:
        return None
    model = model[:MAX_MODEL_CHARS]
    return model if model.isascii() else model.encode("utf-8", "replace").decode()


def _media(payload: RoutedFields) -> int:
    mask = 0
    for bit, value in zip(_RARE.values(), _rare_values(payload), strict=True):
        if bit and is_truthy(value):
            mask |= bit
    for modalities in (payload.modalities, payload.output_modalities):
        if any(read_text(kind) == "audio" for kind in read_elements(modalities)):
            mask |= AUDIO_OUT
    return mask


def _parts(messages: msgspec.Raw, spelled: bytes) -> int:
    mask = 0
    if b'"type"' not in spelled and b"\\u00" not in spelled:
        return mask
    try:
        plain = _decode_messages(messages)
    except MALFORMED:
        return _non_standard_parts(messages)
    for message in plain:
        if type(message.content) is list:
            for part in message.content:
                mask |= _KINDS.get(part.type, 0)
    return mask


def _non_standard_parts(messages: msgspec.Raw) -> int:
    mask = 0
    for message in _parts_in(messages):
        if starts_with(message.content, b"["):
            for part in _parts_in(message.content):
                kind = bytes(part.type)
                mask |= _SPELLED.get(kind, 0)
                if b"\\" in kind:
                    mask |= _KINDS.get(read_text(part.type), 0)
    return mask


def has_voice_reference(payload: VoiceReferenceFields) -> bool:
    """Whether the request includes reference audio of a voice."""
    return is_truthy(payload.ref_audio) or any(
        is_truthy(text.audio_path) or is_truthy(text.ref_audio)
        or is_truthy(text.audio) or is_truthy(text.data)
        for text in _references_in(payload.references)
    )  # fmt: skip


def _read_batch(payload: BodyFields, requirements: Requirements) -> None:
    if requirements.stream:
        raise bad_request("stream is not supported for batch speech requests")
    models = {
        _named(read_text(item.model)) or requirements.model for item in _items_in(payload.items)
    }
    if len(models) > 1:
        raise bad_request("speech batch items must resolve to one model for router forwarding")
    if models:
        requirements.model = models.pop()


def _read_form(body: bytes, content_type: bytes, requirements: Requirements) -> bool:
    """Reads model and stream of a form; returns whether it has any of these fields."""
    texts = form_fields(body, content_type)
    requirements.model = texts.get("model") or None
    if texts.get("stream", "").strip().lower() in ("true", "1", "yes", "on"):
        requirements.stream = True
        requirements.mask |= STREAMING
    return bool(texts)


def _apply_hints(
    requirements: Requirements, hints: dict[bytes, bytes], *, source: str | None
) -> None:
    """Apply hints, which add to the body's fields; a hint that contradicts the body is refused."""
    requirements.version_constraint = parse_version_constraint(hints)
    if b"model" in hints:
        model = hints[b"model"].decode("latin-1").strip()
        if not model:
            raise bad_request(f"{HINT_PREFIX_TEXT}model must not be empty")
        if source and requirements.model is not None and requirements.model != model:
            raise bad_request(
                f"{HINT_PREFIX_TEXT}model conflicts with {_source_text(source)} model"
            )
        requirements.model = model
    if b"stream" in hints:
        stream_hint = hints[b"stream"].strip().lower()
        if stream_hint not in (b"true", b"false"):
            raise bad_request(f"{HINT_PREFIX_TEXT}stream must be true or false")
        if source and (stream_hint == b"true") != requirements.stream:
            raise bad_request(
                f"{HINT_PREFIX_TEXT}stream conflicts with {_source_text(source)} stream"
            )
        requirements.stream = stream_hint == b"true"
        requirements.mask |= STREAMING if requirements.stream else 0
    if b"capabilities" in hints:
        mask = _hinted_mask(hints[b"capabilities"].decode("latin-1"))
        read_whole = source == "JSON body" and not requirements.large_body_class
        if read_whole and mask & ~requirements.mask:
            raise bad_request(f"{HINT_PREFIX_TEXT}capabilities conflicts with JSON body")
        requirements.mask |= mask


def _source_text(source: str) -> str:
    return source if source == "JSON body" else f"the {source}"


def _hinted_mask(text: str) -> int:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise bad_request(f"{HINT_PREFIX_TEXT}capabilities must not be empty")
    for name in names:
        if name not in CAPABILITY_BITS:
            raise bad_request(
                f"{HINT_PREFIX_TEXT}capabilities contains unsupported capability {name!r}"
            )
    return capability_mask(names)
