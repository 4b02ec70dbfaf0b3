"""Voices in speech requests: requests that use an uploaded voice are pinned to its worker.

Contract: omni-router.md 13. A request with its own reference audio, or for the voice `default`,
needs no stored voice. A request whose body was not read completely is pinned to the voice owner.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    BodyFields,
    ObjectListReader,
    is_list,
    is_truthy,
    read_text,
    read_value,
    starts_with,
)
from omni_proxy.routing.inspect.requirements import AUDIO, Requirements, has_voice_reference
from omni_proxy.routing.routes import VOICE_OWNER

SPEECH_TRAFFIC = frozenset(("speech_http", "speech_batch", "tts_websocket"))


class _Item(msgspec.Struct, gc=False):
    """One item of a batch."""

    voice: msgspec.Raw = ABSENT
    speaker: msgspec.Raw = ABSENT
    ref_audio: msgspec.Raw = ABSENT
    references: msgspec.Raw = ABSENT


_items_in = ObjectListReader(_Item, least=len('{"voice":"v"}'))


def pin_to_voice_owner(registry: VoiceRegistry, traffic: str, requirements: Requirements) -> None:
    """Pin the request to the voice owner if it uses a voice that is stored there."""
    if not registry.owner or traffic not in SPEECH_TRAFFIC:
        return
    payload = requirements.body_fields
    # A WebSocket session without a valid first message is not pinned: any worker refuses it.
    unread = (payload is None or bool(requirements.large_body_class)) and traffic != "tts_websocket"
    if unread or (payload is not None and registry.requires_owner(voice_names(payload))):
        requirements.pinning = VOICE_OWNER
        requirements.mask |= AUDIO


def voice_names(payload: BodyFields) -> Iterator[str]:
    """Names of voices that may be uploaded ones, in lower case, including those of batch items."""
    if not (is_list(payload.items) and is_truthy(payload.items)):
        yield from _named(payload, payload)
    for item in _items_in(payload.items):
        yield from _named(item, payload)


def _named(item: _Item | BodyFields, default: BodyFields) -> Iterator[str]:
    """Fields of an item take precedence over the defaults of its batch."""
    if has_voice_reference(item) or (item is not default and has_voice_reference(default)):
        return
    for voice in (item.voice, item.speaker, default.voice, default.speaker):
        if not is_truthy(voice):
            continue
        name = read_text(voice)
        if name is None and (is_list(voice) or starts_with(voice, b"{") or read_value(voice)):
            return  # the first field with a value decides, even if the value is invalid
        if name is not None:
            if name.lower() != "default":
                yield name.lower()
            return
