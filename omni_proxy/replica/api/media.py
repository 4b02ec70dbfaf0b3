"""What chat messages carry besides text: audio is fetched and taken out, the rest is refused.

Invariant: nothing is read from a network or a disk that the operator has not opened; of a message
only its role and content go on. Every audio has a part `{"type": "audio"}`, the k-th part for the
k-th audio; the audios of the list beside the messages belong to the last user message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from omni_proxy.replica.api.audio_forms import (
    ReferenceRefused,
    ReferenceRules,
    as_media,
    decode_base64,
    decode_samples,
    read_reference,
)
from omni_proxy.replica.api.errors import Refused
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.pipeline.requests import Message

TEXT_PARTS = ("text", "input_text")
AUDIO_PARTS = ("input_audio", "audio_url")
_REFUSED = {
    "image_url": "image_input",
    "image": "image_input",
    "input_image": "image_input",
    "video_url": "video_input",
    "video": "video_input",
}


class MediaReader:
    """Reads the audios of one chat request, in order."""

    def __init__(self, served: Served) -> None:
        folder = served.allowed_local_media_path
        self._served = served
        self._rules = ReferenceRules(
            allowed_domains=served.allowed_media_domains,
            allowed_folder=Path(folder) if folder is not None else None,
            most_bytes=served.max_media_bytes,
        )
        self.audios: list[dict[str, Any]] = []

    async def messages(
        self, given: Sequence[tuple[str, Any]], listed: Sequence[str]
    ) -> list[Message]:
        """From roles and contents and the list beside them. Raises Refused 400."""
        roles = [role for role, _ in given]
        asking = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else len(roles)
        taken = []
        for at, (role, content) in enumerate(given):
            parts = await self._parts(content, f"messages[{at}].content")
            if at == asking:
                parts += await self._listed(listed)
            taken.append(_message(role, parts))
        if asking == len(roles) and listed:
            taken.append(_message("user", await self._listed(listed)))
        return taken

    async def _parts(self, content: Any, where: str) -> list[dict[str, Any]]:
        if content is None or isinstance(content, str):
            return [{"type": "text", "text": content or ""}]
        if not isinstance(content, list):
            raise Refused(400, f"{where} must be a string or a list of parts")
        return [await self._part(part, f"{where}[{at}]") for at, part in enumerate(content)]

    async def _part(self, part: Any, where: str) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            if not isinstance(part.get("text"), str):
                raise Refused(400, f"{where}.text must be a string")
            return {"type": "text", "text": part["text"]}
        if kind in AUDIO_PARTS:
            await self._add(_source(part, kind, where), where)
            return {"type": "audio"}
        if kind in _REFUSED:
            refuse_unseen(_REFUSED[kind], where)
        known = ", ".join((*TEXT_PARTS[:1], *AUDIO_PARTS))
        raise Refused(400, f"{where}.type {kind!r} is not known; known are {known}")

    async def _listed(self, audios: Sequence[str]) -> list[dict[str, Any]]:
        for at, source in enumerate(audios):
            await self._add(source, f"audios[{at}]")
        return [{"type": "audio"} for _ in audios]

    async def _add(self, source: str, where: str) -> None:
        if not self._served.can("audio_input"):
            refuse_unheard(where)
        try:
            if _is_reference(source):
                data = await read_reference(source, self._rules)
            else:
                data = decode_base64(source, self._rules.most_bytes)
            samples, rate = await trio.to_thread.run_sync(decode_samples, data)
        except (ReferenceRefused, ValueError) as error:
            raise Refused(400, f"{where}: {error}") from None
        self.audios.append(as_media(samples, rate))


def _message(role: str, parts: list[dict[str, Any]]) -> Message:
    """Text alone becomes one string, which is what every chat template knows."""
    if all(part["type"] == "text" for part in parts):
        return Message(role, "\n".join(part["text"] for part in parts))
    return Message(role, parts)


def refuse_unseen(capability: str, where: str) -> None:
    what = "images" if capability == "image_input" else "videos"
    raise Refused(400, f"{where}: this server takes no {what}: its model reads text alone")


def refuse_unheard(where: str) -> None:
    told = f"{where}: this server takes no audio: start it with a transcription model"
    raise Refused(400, told)


def _is_reference(source: str) -> bool:
    """A URL or a path; bare base64 has neither a colon nor a dot, and may begin with "/"."""
    return ":" in source[:16] or "." in source[:4096]


def _source(part: Mapping[str, Any], kind: str, where: str) -> str:
    """OpenAI's `input_audio.data` is base64; `audio_url` holds a URL, bare or under `url`."""
    held = part.get(kind)
    key = "data" if kind == "input_audio" else "url"
    source = held.get(key) if isinstance(held, dict) else held
    if not isinstance(source, str) or not source:
        raise Refused(400, f"{where}.{kind}.{key} must be a string")
    return source
