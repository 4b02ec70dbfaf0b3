"""The token ids of a request that brings its prompt as tokens, as RL rollouts do.

They stay as the body spells them: reading a thousand integers takes ten times as long as what is
done with them. Invariant: ids that are returned are the whole prompt, or its first `MAX_BYTES`, and
the engine caches it as plain tokens of the base model: a request with a text, with media, with
several prompts, with an adapter or with a cache salt has none.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    BodyFields,
    NonStandardBodyFields,
    is_given,
    starts_with,
)
from omni_proxy.routing.inspect.keyed_text import KeyedBodyFields
from omni_proxy.routing.inspect.requirements import AUDIO, IMAGE, VIDEO, Requirements
from omni_proxy.routing.kv_events.spelled_ids import without_spaces

MAX_BYTES = (
    512 * 1024
)  # ids behind them hardly change where a prompt is cached; not final: tests set it
_WHITE_SPACE: Final = b" \t\r\n"
_LINE_SPACE: Final = b"\t\r\n"
_OF_OTHER_VALUES: Final = b'".eE-n{['  # one of them is in whatever else can stand in a list
# With a space behind each comma and none elsewhere, as Python's json.dumps writes lists: then there
# are as many ids as spaces, and one. Counting both would cost as much again.
_IS_SPACED: Final = re.compile(rb",[0-9]++(?:, [0-9]++){4}")
COMMA: Final = b","
_MEDIA: Final = IMAGE | AUDIO | VIDEO
_sources = attrgetter("input_ids", "token_ids", "prompt")
_elsewhere = attrgetter("messages", "text", "system", "lora_path", "cache_salt", "extra_key")
_NOTHING: Final = (ABSENT,) * 6


def spelled_tokens(requirements: Requirements) -> msgspec.Raw | None:
    """The value of the body that may be such a prompt, undecoded."""
    fields = requirements.body_fields
    if fields is None or type(fields) is NonStandardBodyFields:
        return None
    raw = _only_list(fields)
    if raw is None or requirements.large_body_class or requirements.mask & _MEDIA:
        return None
    elsewhere = _elsewhere(fields)
    return raw if elsewhere == _NOTHING or not any(map(is_given, elsewhere)) else None


def spelled_ids(raw: msgspec.Raw) -> tuple[bytes, int | None]:
    """The ids of a valid JSON list, each with a comma before it; b"" for anything but integers that
    are not negative, or one list of them. JSON has one spelling of each, but for white space. How
    many they are, if that is known; it is wrong where a list is spelled in several ways."""
    spelled = b"".join((COMMA, memoryview(raw)[1:-1]))
    spaces = 0
    if any(map(spelled.__contains__, _LINE_SPACE)):
        spelled = spelled.translate(None, _WHITE_SPACE)
    elif b" " in spelled:
        length = len(spelled)
        is_uniform = _IS_SPACED.match(spelled) and not spelled.endswith(b" ")
        spelled = without_spaces(spelled)
        spaces = length - len(spelled) if is_uniform else 0
    if spelled.startswith(b",["):
        if not spelled.endswith(b"]"):
            return b"", 0
        spelled, spaces = COMMA + spelled[2:-1], 0
    if any(map(spelled.__contains__, _OF_OTHER_VALUES)):
        return b"", 0
    if len(spelled) > MAX_BYTES:
        spelled, spaces = spelled[: spelled.rfind(COMMA, 0, MAX_BYTES)], 0
    if len(spelled) <= len(COMMA):
        return b"", 0
    return spelled, spaces + 1 if spaces else None


def _only_list(fields: BodyFields) -> msgspec.Raw | None:
    """The one value that may be a list of ids."""
    if isinstance(fields, KeyedBodyFields):
        given = [raw for _, raw in fields.keyed]
    else:
        given = [raw for raw in _sources(fields) if is_given(raw)]
    return given[0] if len(given) == 1 and starts_with(given[0], b"[") else None
