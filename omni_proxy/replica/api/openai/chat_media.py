"""What chat messages carry besides text: audio and images are fetched and taken out.

Invariant: nothing is read from a network or a disk that the operator has not opened; of a message
only its role and content go on. Every audio has a part `{"type": "audio"}`, the k-th part for the
k-th audio, and every image a part `{"type": "image"}`; those of the lists beside the messages
belong to the last user message. What the server cannot use is refused before it is fetched.
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

MAX_MESSAGES = 10_000  # more than any model's context holds; each is walked through here
MAX_IMAGES = 16  # of one request; reading each of them takes seconds
TEXT_PARTS = ("text", "input_text")
VIDEO_PARTS = ("video_url", "video", "input_video")
# By type of part: what it is, and the keys that lead to its URL, path or base64.
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
    """Reads the audios and images of one chat request, in order, into `media`."""

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
        self, given: Sequence[tuple[str, Any]], listed: Mapping[str, Sequence[str]]
    ) -> list[PromptMessage]:
        """From roles and contents and the lists beside them, by kind. Raises DetailError 400."""
        if len(given) > MAX_MESSAGES:
            told = f"messages has {len(given)} elements; at most {MAX_MESSAGES} are taken"
            raise DetailError(400, told)
        roles = [role for role, _ in given]
        asking = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else len(roles)
        taken = []
        for at, (role, content) in enumerate(given):
            parts = await self._parts(content, f"messages[{at}].content")
            if at == asking:
                parts += await self._listed(listed)
            taken.append(_message(role, parts))
        if asking == len(roles) and any(listed.values()):
            taken.append(_message("user", await self._listed(listed)))
        return taken

    async def _parts(self, content: Any, where: str) -> list[dict[str, Any]]:
        if content is None or isinstance(content, str):
            return [{"type": "text", "text": content or ""}]
        if not isinstance(content, list):
            raise DetailError(400, f"{where} must be a string or a list of parts")
        return [await self._part(part, f"{where}[{at}]") for at, part in enumerate(content)]

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
        known = ", ".join((*TEXT_PARTS[:1], *MEDIA_PARTS))
        raise DetailError(400, f"{where}.type {kind!r} is not known; known are {known}")

    async def _listed(self, listed: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        parts = []
        for medium, sources in listed.items():
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
            taken: Any = data
            if medium == "audio":
                samples, rate = await trio.to_thread.run_sync(decode_audio_samples, data)
                taken = to_stage_audio(samples, rate)
        except (MediaError, ValueError) as error:
            raise DetailError(400, f"{where}: {error}") from None
        self.media[f"{medium}s"].append(taken)

    async def _bytes(self, source: str, rules: MediaRules) -> bytes:
        if _is_reference(source):
            return await read_media(source, rules)
        return decode_base64(source, rules.most_bytes)


def _message(role: str, parts: list[dict[str, Any]]) -> PromptMessage:
    """Text alone becomes one string, which is what every chat template knows."""
    if all(part["type"] == "text" for part in parts):
        return PromptMessage(role, "\n".join(part["text"] for part in parts))
    return PromptMessage(role, parts)


def raise_unsupported_medium(medium: str, where: str) -> NoReturn:
    """Raises DetailError 400 with the way to a server that takes it."""
    raise DetailError(400, f"{where}: {_UNSUPPORTED[medium]}")


def _is_reference(source: str) -> bool:
    """A URL or a path; bare base64 has neither a colon nor a dot, and may begin with "/"."""
    return ":" in source[:16] or "." in source[:4096]


def _source(part: Mapping[str, Any], keys: Sequence[str], where: str) -> str:
    """OpenAI's `input_audio.data` is base64; the others hold a URL, bare or under `url`."""
    outer, inner = keys
    held = part.get(outer)
    source = held.get(inner) if isinstance(held, dict) else held
    if not isinstance(source, str) or not source:
        raise DetailError(400, f"{where}.{outer}.{inner} must be a string")
    return source
