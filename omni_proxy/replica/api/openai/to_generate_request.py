"""Converts body fields to a pipeline request: sampling, prompts, messages, media, response_format.

Invariant: a field that is absent or null stays unset, so that the stage's defaults apply. A parsed
prompt is never empty, and token ids are integers of at least 0. An unsupported field that would
change the response is refused by name; hints are ignored. A response_format is enforced or refused
with 400. All checks are made before anything is computed and before a stream's head is sent. Media
is read only as the operator allows, and refused before it is fetched if the server cannot use it;
the k-th part `{"type": "audio"}` or `{"type": "image"}` refers to the k-th audio or image.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, TypeGuard

import msgspec
import trio
from msgspec import Meta, Struct

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.api.common.media import (
    MediaError,
    MediaRules,
    decode_audio_samples,
    decode_base64,
    read_media,
    to_stage_audio,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.requests import PromptMessage, SamplingParams
from omni_proxy.replica.text.json_schema import (
    ANY_OBJECT,
    ConstraintError,
    MissingLibraryError,
    check_schema,
)
from omni_proxy.replica.text.sampling import SamplingError, parse_biases

# Integers that fit into a msgpack message between stages.
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt64 = Annotated[int, Meta(ge=1, le=2**63 - 1)]
MAX_PROMPTS = 2048  # OpenAI's limit for inputs; also bounds the work of a single body
MAX_PROMPT_TOKENS = 1 << 20  # above any context here; bounds the time to validate a prompt
Prompt: TypeAlias = str | list[int]
_USE_RESPONSE_FORMAT = "set a JSON schema in response_format instead"
UNSUPPORTED_FIELDS = {
    "guided_json": _USE_RESPONSE_FORMAT,
    "guided_regex": _USE_RESPONSE_FORMAT,
    "guided_choice": _USE_RESPONSE_FORMAT,
    "guided_grammar": _USE_RESPONSE_FORMAT,
    "structured_outputs": _USE_RESPONSE_FORMAT,
    "structural_tag": _USE_RESPONSE_FORMAT,
    "json_schema": _USE_RESPONSE_FORMAT,
    "regex": _USE_RESPONSE_FORMAT,
    "ebnf": _USE_RESPONSE_FORMAT,
    "min_tokens": "a minimum length cannot be enforced",
    "min_new_tokens": "a minimum length cannot be enforced",
    "bad_words": "use logit_bias for token ids",
    "allowed_token_ids": "use logit_bias for token ids",
    "use_beam_search": "responses are sampled",
    "prompt_logprobs": "log probabilities are returned only for generated tokens",
    "include_stop_str_in_output": "a response ends before its stop string",
    "continue_final_message": "a response is always a new message",
    "chat_template": "only the model's own template is used",
    "truncate_prompt_tokens": "shorten the prompt",
    "web_search_options": "the model has no network access",
}
# Fields of the same name in the bodies of all text routes and in SamplingParams.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
SHAPING_FIELDS = ("presence_penalty", "frequency_penalty", "logit_bias")
NO_TOOLS = "this server calls no tools; omit it, or set a JSON schema in response_format"
TEXT_TOOL_CHOICES = (None, "auto", "none")
FIELD = "response_format"
KINDS = ("text", "json_object", "json_schema")
MAX_MESSAGES = 10_000  # above any context here; bounds the time to parse them
MAX_IMAGES = 16  # per request; OCR of one image takes seconds
TEXT_PARTS = ("text", "input_text")
VIDEO_PARTS = ("video_url", "video", "input_video")
# Type of a part -> its medium, and the keys that lead to its URL, path or base64.
MEDIA_PARTS = {
    "input_audio": ("audio", "input_audio", "data"),
    "audio_url": ("audio", "audio_url", "url"),
    "image_url": ("image", "image_url", "url"),
    "input_image": ("image", "image_url", "url"),
    "image": ("image", "image", "url"),
}
_UNSUPPORTED = {
    "audio": "this server accepts no audio: start it with a transcription model",
    "image": "this server accepts no images: its model reads only text; start it with --images ocr "
    "(after pip install 'omni-proxy[ocr]') to read the text in images",
    "video": "this server accepts no videos: its model reads only text",
}


class CommonFields(Struct, kw_only=True):
    """Fields that chat and completion bodies share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    max_tokens: PositiveInt64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    n: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    stage_sampling: dict[str, dict[str, Any]] | None = None
    stage_params: dict[str, dict[str, Any]] | None = None
    request_id: str | None = None
    rid: str | list[str] | None = None


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings in request order, without empty ones, which would end every text immediately."""
    stops = [stop] if isinstance(stop, str) else stop or []
    return tuple(text for text in stops if text)


def sampling_params(
    body: Struct,
    max_new_tokens: int | None,
    *,
    logprobs: bool = False,
    top: int | None = None,
    schema: str | None = None,
) -> SamplingParams:
    """The sampling fields of a text route's body, which have the same names in all routes.

    A field that the body does not have is unset. A penalty of 0 and an empty bias are unset, too,
    so that the request gets the plain sampler. `top` is the number of top candidates to list per
    token; it implies `logprobs`.
    """
    field = partial(getattr, body)
    return SamplingParams(
        **{name: field(name, None) for name in SAMPLING_FIELDS},
        **{name: field(name, None) or None for name in SHAPING_FIELDS},
        max_new_tokens=max_new_tokens,
        stop=stop_strings(field("stop", None)),
        stop_token_ids=tuple(field("stop_token_ids", None) or ()),
        ignore_eos=bool(field("ignore_eos", None)),
        logprobs=logprobs or top is not None,
        top_logprobs=top,
        json_schema=schema,
    )


def check_biases(body: CommonFields, context: RouteContext) -> None:
    """Raises DetailError 400 for a bias that no stage accepts, before a stream's head is sent."""
    try:
        biases = parse_biases("logit_bias", body.logit_bias or {})
    except SamplingError as error:
        raise DetailError(400, str(error)) from None
    sizes = (info.get("vocabulary") for info in context.client.stage_info().values())
    vocabulary = max((size for size in sizes if size), default=None)
    for token in biases:
        if vocabulary is not None and token >= vocabulary:
            raise DetailError(
                400,
                f"logit_bias: token {token} is out of vocabulary: the model's tokens are 0 to "
                f"{vocabulary - 1}",
            )


def new_request_id(caller_id: str | None = None) -> str:
    return caller_id or str(uuid.uuid4())


def parse_prompts(value: Any, name: str) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether `value` was a list of them. Raises DetailError 400."""
    if isinstance(value, list) and len(value) > MAX_PROMPT_TOKENS:
        raise DetailError(
            400, f"{name} has {len(value)} elements; the limit is {MAX_PROMPT_TOKENS}"
        )
    if isinstance(value, str) or is_token_ids(value):
        return [value], False
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS:
            raise DetailError(400, f"{name} has {len(value)} elements; the limit is {MAX_PROMPTS}")
        if all(isinstance(prompt, str) for prompt in value) or all(map(is_token_ids, value)):
            return value, True
    message = "must be a string, a list of token ids, or a non-empty list of either"
    raise DetailError(400, f"{name} {message}")


def is_token_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(_is_token_id, value))


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def check_supported_fields(fields: dict[str, Any]) -> None:
    """Raises DetailError 400 for the first unsupported field of a body that is set."""
    for name, instead in UNSUPPORTED_FIELDS.items():
        if fields.get(name):  # null, false, 0 and empty values request nothing
            raise DetailError(400, f"{name} is not supported: {instead}")


def check_no_tools(fields: dict[str, Any]) -> None:
    """Raises DetailError 400 if a body requires a tool call; "auto" allows a text response."""
    for name in ("tool_choice", "function_call"):
        if fields.get(name) not in TEXT_TOOL_CHOICES:
            raise DetailError(400, f"{name} must be auto or none: {NO_TOOLS}")


async def response_schema(
    context: RouteContext, response_format: dict[str, Any] | None
) -> str | None:
    """Return the schema of a `response_format` as text; None if the response is not constrained.

    Raises DetailError: 400 for a schema that cannot be enforced, 501 if the package is missing.
    """
    schema = _schema(response_format or {"type": "text"})
    if schema is None:
        return None
    infos = context.client.stage_info().values()
    # A stage that is not ready has not reported its features: the request fails like any other.
    ready = context.client.health()["status"] == "healthy"
    if ready and not any(info.get("json_schemas") for info in infos):
        message = "no stage of this pipeline can enforce a JSON schema; omit it"
        raise DetailError(400, f"{FIELD}: {message}")
    try:
        # Not on the event loop: checking a large schema is slow.
        await trio.to_thread.run_sync(check_schema, schema)
    except ConstraintError as error:
        raise DetailError(400, f"{FIELD}.json_schema.schema: {error}") from None
    except MissingLibraryError as error:
        raise DetailError(501, f"{FIELD}: {error}") from None
    return schema


def _schema(response_format: dict[str, Any]) -> str | None:
    kind = response_format.get("type")
    if kind not in KINDS:
        raise DetailError(400, f"{FIELD}.type must be one of {', '.join(KINDS)}, not {kind!r:.40}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    json_schema = response_format.get("json_schema")
    if not isinstance(json_schema, dict):
        raise DetailError(400, f"{FIELD}.json_schema must be an object with a schema")
    if not isinstance(json_schema.get("strict"), bool | None):
        raise DetailError(400, f"{FIELD}.json_schema.strict must be true, false or null")
    schema = json_schema.get("schema")
    if not isinstance(schema, dict):
        raise DetailError(400, f"{FIELD}.json_schema.schema must be an object: a JSON schema")
    return msgspec.json.encode(schema).decode()


class MediaReader:
    """Reads the audio and images of one chat request, in order, into `media`."""

    def __init__(self, context: RouteContext) -> None:
        folder = context.allowed_local_media_path
        self._context = context
        self._rules = {
            kind: MediaRules(
                allowed_domains=context.allowed_media_domains,
                allowed_folder=Path(folder) if folder is not None else None,
                max_bytes=context.max_media_bytes,
                kind=kind,
            )
            for kind in ("audio", "image")
        }
        self.media: dict[str, list[Any]] = {"audios": [], "images": []}

    async def messages(
        self, turns: Sequence[tuple[str, Any]], attachments: Mapping[str, Sequence[str]]
    ) -> list[PromptMessage]:
        """Convert roles and contents, and the body's media lists. Raises DetailError 400."""
        if len(turns) > MAX_MESSAGES:
            message = f"messages has {len(turns)} elements; the limit is {MAX_MESSAGES}"
            raise DetailError(400, message)
        roles = [role for role, _ in turns]
        last_user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else len(roles)
        messages = []
        for index, (role, content) in enumerate(turns):
            parts = await self._parts(content, f"messages[{index}].content")
            if index == last_user:
                parts += await self._attachment_parts(attachments)
            messages.append(_message(role, parts))
        if last_user == len(roles) and any(attachments.values()):
            messages.append(_message("user", await self._attachment_parts(attachments)))
        return messages

    async def _parts(self, content: Any, where: str) -> list[dict[str, Any]]:
        if content is None or isinstance(content, str):
            return [{"type": "text", "text": content or ""}]
        if not isinstance(content, list):
            raise DetailError(400, f"{where} must be a string or a list of parts")
        return [await self._part(part, f"{where}[{index}]") for index, part in enumerate(content)]

    async def _part(self, part: Any, where: str) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            if not isinstance(part.get("text"), str):
                raise DetailError(400, f"{where}.text must be a string")
            return {"type": "text", "text": part["text"]}
        if kind in MEDIA_PARTS:
            medium, *keys = MEDIA_PARTS[kind]
            await self._add(medium, _source(part, keys, where), where)
            return {"type": medium}
        if kind in VIDEO_PARTS:
            raise_unsupported_medium("video", where)
        supported = ", ".join((*TEXT_PARTS[:1], *MEDIA_PARTS))
        raise DetailError(400, f"{where}.type {kind!r} is not supported; use one of {supported}")

    async def _attachment_parts(
        self, attachments: Mapping[str, Sequence[str]]
    ) -> list[dict[str, Any]]:
        parts = []
        for medium, sources in attachments.items():
            for index, source in enumerate(sources):
                await self._add(medium, source, f"{medium}s[{index}]")
                parts.append({"type": medium})
        return parts

    async def _add(self, medium: str, source: str, where: str) -> None:
        if not self._context.can(f"{medium}_input"):
            raise_unsupported_medium(medium, where)
        if medium == "image" and len(self.media["images"]) == MAX_IMAGES:
            raise DetailError(400, f"{where}: a request may have at most {MAX_IMAGES} images")
        try:
            data = await self._bytes(source, self._rules[medium])
            media: Any = data
            if medium == "audio":
                samples, rate = await trio.to_thread.run_sync(decode_audio_samples, data)
                media = to_stage_audio(samples, rate)
        except (MediaError, ValueError) as error:
            raise DetailError(400, f"{where}: {error}") from None
        self.media[f"{medium}s"].append(media)

    async def _bytes(self, source: str, rules: MediaRules) -> bytes:
        if _is_reference(source):
            return await read_media(source, rules)
        return decode_base64(source, rules.max_bytes)


def _message(role: str, parts: list[dict[str, Any]]) -> PromptMessage:
    """Join a message of only text parts to one string, which every chat template supports."""
    if all(part["type"] == "text" for part in parts):
        return PromptMessage(role, "\n".join(part["text"] for part in parts))
    return PromptMessage(role, parts)


def raise_unsupported_medium(medium: str, where: str) -> NoReturn:
    """Raises DetailError 400, whose message says how to start a server that supports it."""
    raise DetailError(400, f"{where}: {_UNSUPPORTED[medium]}")


def _is_reference(source: str) -> bool:
    """Whether `source` is a URL or path; base64 has no colon and no dot, and may begin with "/"."""
    return ":" in source[:16] or "." in source[:4096]


def _source(part: Mapping[str, Any], keys: Sequence[str], where: str) -> str:
    """OpenAI's `input_audio.data` is base64; the others hold a URL, directly or under `url`."""
    outer, inner = keys
    outer_value = part.get(outer)
    source = outer_value.get(inner) if isinstance(outer_value, dict) else outer_value
    if not isinstance(source, str) or not source:
        raise DetailError(400, f"{where}.{outer}.{inner} must be a string")
    return source
