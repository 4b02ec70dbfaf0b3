"""What a speech session's messages hold, read and checked (api-server.md 1.6).

Invariant: nothing is sent or spoken here; a message that means nothing is a SpeechRefusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_proxy.replica.api.envelope import SpeechRefusal
from omni_proxy.replica.api.speech_fields import SpeechAsk, read_ask, read_object

GRANULARITIES: Final = ("sentence", "clause")
# Text of a frame, or bytes; None is what Quart makes of a binary frame without bytes.
Frame = str | bytes | None


class NotText(Exception):
    """A binary frame: the protocol has none from the client."""


class FrameTooLong(Exception):
    """A frame beyond its limit."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How every sentence of a session is to be spoken."""

    ask: SpeechAsk
    stream_audio: bool = False
    split_granularity: str = "sentence"


def read_message(frame: Frame, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a text frame. Raises NotText, FrameTooLong, SpeechRefusal."""
    if not isinstance(frame, str):
        raise NotText
    if len(frame) > most_bytes or len(data := frame.encode()) > most_bytes:
        raise FrameTooLong
    return read_object(data, "a message")


def read_config(message: Mapping[str, Any]) -> SessionConfig:
    """Read a session.config, whose fields stand under "session" or beside its type.

    Raises SpeechRefusal.
    """
    if message.get("type") != "session.config":
        raise SpeechRefusal("the first message must be session.config", "type")
    fields = message.get("session", message)
    if not isinstance(fields, dict):
        raise SpeechRefusal("session must be an object", "session")
    stream_audio = fields.get("stream_audio")
    if stream_audio is not None and not isinstance(stream_audio, bool):
        raise SpeechRefusal("stream_audio must be true or false", "stream_audio")
    granularity = fields.get("split_granularity")
    if granularity is not None and granularity not in GRANULARITIES:
        names = " or ".join(GRANULARITIES)
        raise SpeechRefusal(f"split_granularity must be {names}", "split_granularity")
    ask = read_ask(fields, default_format="pcm")
    if stream_audio and ask.response_format != "pcm":
        raise SpeechRefusal('stream_audio needs response_format="pcm" or none', "response_format")
    return SessionConfig(ask, bool(stream_audio), granularity or GRANULARITIES[0])
