"""Media in chat messages: audio and images are read and taken out of the messages.

Invariant: nothing is read from a network or a disk that the operator has not allowed; only role and
content of a message are passed on. Every audio has a part `{"type": "audio"}`, the k-th part for
the k-th audio, every image a part `{"type": "image"}`; media of the lists beside the messages
belong to the last user message. Media that the server cannot use is refused before it is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import trio

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
from omni_proxy.replica.pipeline.requests import PromptMessage

MAX_MESSAGES = 10_000  # more than fits into any model's context; every message is parsed here
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
    "audio": "this server takes no audio: start it with a transcription model",
    "image": "this server takes no images: its model reads text alone; start it with --images ocr "
    "(after pip install 'omni-proxy[ocr]') to have the text in them read",
    "video": "this server takes no videos: its model reads text alone",
}


class MediaReader:
    """Reads the audio and images of one chat request, in order, into `media`."""

    def __init__(self, context: RouteContext) -> None:
        folder = context.allowed_local_media_path
        self._context = context
        self._rules = {
            kind: MediaRules(
                allowed_domains=context.allowed_media_domains,
                allowed_folder=Path(folder) if folder is not None else None,
                most_bytes=context.max_media_bytes,
                kind=kind,
            )
            for kind in ("audio", "image")
        }
        self.media: dict[str, list[Any]] = {"audios": [], "images": []}

    async def messages(
        self, given: Sequence[tuple[str, Any]], attachments: Mapping[str, Sequence[str]]
    ) -> list[PromptMessage]:
        """Convert roles and contents, and the media lists beside them. Raises DetailError 400."""
        if len(given) > MAX_MESSAGES:
            message = f"messages has {len(given)} elements; at most {MAX_MESSAGES} are taken"
            raise DetailError(400, message)
        roles = [role for role, _ in given]
        last_user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else len(roles)
        messages = []
        for index, (role, content) in enumerate(given):
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
        raise DetailError(400, f"{where}.type {kind!r} is not known; known are {supported}")

    async def _attachment_parts(
        self, attachments: Mapping[str, Sequence[str]]
    ) -> list[dict[str, Any]]:
        parts = []
        for medium, sources in attachments.items():
            for at, source in enumerate(sources):
                await self._add(medium, source, f"{medium}s[{at}]")
                parts.append({"type": medium})
        return parts

    async def _add(self, medium: str, source: str, where: str) -> None:
        if not self._context.can(f"{medium}_input"):
            raise_unsupported_medium(medium, where)
        if medium == "image" and len(self.media["images"]) == MAX_IMAGES:
            raise DetailError(400, f"{where}: at most {MAX_IMAGES} images are read for one request")
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
        return decode_base64(source, rules.most_bytes)


def _message(role: str, parts: list[dict[str, Any]]) -> PromptMessage:
    """A message of text parts only becomes one string, which every chat template supports."""
    if all(part["type"] == "text" for part in parts):
        return PromptMessage(role, "\n".join(part["text"] for part in parts))
    return PromptMessage(role, parts)


def raise_unsupported_medium(medium: str, where: str) -> NoReturn:
    """Raises DetailError 400 that says how to start a server that supports it."""
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
