"""The tokens of a request's prompt: its token ids, as in RL rollouts, or a body for /tokenize.

Invariant: the tokens are the whole prompt, and the engine caches it as plain tokens of the base
model. So there are none for a request with media, several prompts, an adapter or a cache salt.
Token ids stay as text of the body, up to `MAX_BYTES`: parsing the integers would take longer
than their use. A body for an engine's /tokenize has one text, or messages with all
fields that the chat template uses; there is none for requests that continue the assistant's
message. Source: vLLM's and SGLang's API of /tokenize.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    BodyFields,
    KeyedBodyFields,
    NonStandardBodyFields,
    is_given,
    starts_with,
)
from omni_proxy.routing.inspect.requirements import MEDIA, Requirements
from omni_proxy.routing.token_id_text import without_spaces

# Ids after these bytes hardly change where a prompt is cached. Not Final: tests set it.
MAX_BYTES = 512 * 1024
_WHITE_SPACE: Final = b" \t\r\n"
_LINE_SPACE: Final = b"\t\r\n"
_OF_OTHER_VALUES: Final = b'".eE-n{['  # every other value in a JSON list has at least one of these
# A space after each comma and nowhere else, as Python's json.dumps writes lists: the number of ids
# is then the number of spaces plus one, which avoids counting.
_IS_SPACED: Final = re.compile(rb",[0-9]++(?:, [0-9]++){4}")
COMMA: Final = b","
# Fields with which an engine caches a prompt separately, or that precede the prompt.
_SEPARATE: Final = ("system", "lora_path", "cache_salt", "extra_key")
_sources = attrgetter("input_ids", "token_ids", "prompt")
_other_inputs = attrgetter("messages", "text", *_SEPARATE)
_NOTHING: Final = (ABSENT,) * 6


def token_id_list(requirements: Requirements) -> msgspec.Raw | None:
    """The undecoded value in the body that may be a prompt of token ids."""
    fields = requirements.body_fields
    if fields is None or type(fields) is NonStandardBodyFields:
        return None
    raw = _only_list(fields)
    if raw is None or requirements.large_body_class or requirements.mask & MEDIA:
        return None
    others = _other_inputs(fields)
    return raw if others == _NOTHING or not any(map(is_given, others)) else None


def join_token_ids(raw: msgspec.Raw) -> tuple[bytes, int | None]:
    """The ids of a valid JSON list, each with a comma before it, and their number if known.

    b"" unless the list has only non-negative integers, or one list of them. Without white space,
    JSON has only one spelling of them. The number is wrong if a list mixes spacing styles.
    """
    text = b"".join((COMMA, memoryview(raw)[1:-1]))
    spaces = 0
    if any(map(text.__contains__, _LINE_SPACE)):
        text = text.translate(None, _WHITE_SPACE)
    elif b" " in text:
        length = len(text)
        is_uniform = _IS_SPACED.match(text) and not text.endswith(b" ")
        text = without_spaces(text)
        spaces = length - len(text) if is_uniform else 0
    if text.startswith(b",["):
        if not text.endswith(b"]"):
            return b"", 0
        text, spaces = COMMA + text[2:-1], 0
    if any(map(text.__contains__, _OF_OTHER_VALUES)):
        return b"", 0
    if len(text) > MAX_BYTES:
        text, spaces = text[: text.rfind(COMMA, 0, MAX_BYTES)], 0
    if len(text) <= len(COMMA):
        return b"", 0
    return text, spaces + 1 if spaces else None


def _only_list(fields: BodyFields) -> msgspec.Raw | None:
    """The only value that may be a list of ids; None if there are more, or none."""
    if isinstance(fields, KeyedBodyFields):
        values = [raw for _, raw in fields.keyed]
    else:
        values = [raw for raw in _sources(fields) if is_given(raw)]
    return values[0] if len(values) == 1 and starts_with(values[0], b"[") else None


# Fields that a chat template uses in addition to the messages.
TEMPLATE_FIELDS: Final = ("tools", "chat_template_kwargs", "add_generation_prompt")
_template_values = attrgetter(*TEMPLATE_FIELDS)
_not_tokenized = attrgetter(
    *_SEPARATE, "input_ids", "token_ids", "chat_template", "documents", "continue_final_message"
)
_texts = attrgetter("messages", "prompt", "text")


def tokenize_body(requirements: Requirements) -> bytes | None:
    """None if /tokenize can't return the tokens of the whole prompt."""
    fields = requirements.body_fields
    if fields is None or isinstance(fields, KeyedBodyFields | NonStandardBodyFields):
        return None
    if requirements.large_body_class or requirements.mask & MEDIA:
        return None
    texts = [raw for raw in _texts(fields) if is_given(raw)]
    if len(texts) != 1 or any(map(is_given, _not_tokenized(fields))):
        return None
    is_chat = is_given(fields.messages)
    if not starts_with(texts[0], b"[" if is_chat else b'"'):
        return None
    values = {"messages" if is_chat else "prompt": texts[0]}
    if requirements.model is not None:
        values["model"] = msgspec.Raw(msgspec.json.encode(requirements.model))
    if is_chat:
        values |= _template(fields)
    return msgspec.json.encode(values)


def template_mark(requirements: Requirements) -> bytes:
    """The fields, encoded, that change how the same text is tokenized; b"" for most requests."""
    fields = requirements.body_fields
    if fields is None or not any(map(is_given, _template_values(fields))):
        return b""
    return msgspec.json.encode(_template(fields))


def _template(fields: BodyFields) -> dict[str, msgspec.Raw]:
    values = zip(TEMPLATE_FIELDS, _template_values(fields), strict=True)
    return {name: raw for name, raw in values if is_given(raw)}
