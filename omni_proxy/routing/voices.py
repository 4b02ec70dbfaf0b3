"""Which voices a speech request names, and whether they bind it to the worker that keeps them.

Contract: omni-router.md 13. A request that brings its own reference needs no uploaded voice, nor
does one for `default`. Of a body that was not read whole nobody knows: it goes to the owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omni_proxy.fleet.voices import VoiceRegistry
from omni_proxy.routing.inspect import AUDIO, Need, Payload, has_reference
from omni_proxy.routing.table import VOICE_OWNER

SPEECH_TRAFFIC = frozenset(("speech_http", "speech_batch", "tts_websocket"))
_ITEM_FIELDS = ("voice", "speaker", "ref_audio", "references")


def bind_to_owner(registry: VoiceRegistry, traffic: str, need: Need) -> None:
    """Bind `need` to the owner where a voice of its own asks for that."""
    if not registry.owner or traffic not in SPEECH_TRAFFIC:
        return
    payload = need.body
    # A session whose first message tells nothing is for any worker to refuse.
    unread = (payload is None or bool(need.large)) and traffic != "tts_websocket"
    if unread or (payload is not None and registry.pins(named_voices(payload))):
        need.place = VOICE_OWNER
        need.mask |= AUDIO


def named_voices(payload: Payload) -> Iterator[str]:
    """Lower-case names of voices that may be uploaded ones, those of a batch's items too."""
    items = payload.items if isinstance(payload.items, list) else []
    if not items:
        yield from _named(payload, payload)
    for item in items:
        if isinstance(item, dict):
            fields = {name: item[name] for name in _ITEM_FIELDS if name in item}
            yield from _named(Payload(**fields), payload)


def _named(payload: Payload, default: Payload) -> Iterator[str]:
    """An item's fields win over the defaults of its batch."""
    if has_reference(payload) or (payload is not default and has_reference(default)):
        return
    voice: Any = payload.voice or payload.speaker or default.voice or default.speaker
    if isinstance(voice, str) and voice.lower() != "default":
        yield voice.lower()
