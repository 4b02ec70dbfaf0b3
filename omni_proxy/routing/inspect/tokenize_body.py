"""Bodies for an engine's /tokenize that return the tokens of a request's prompt.

Invariant: a returned body represents the whole prompt: messages with all fields that the engine's
chat template uses, or one text. There is none for requests with media, several prompts, an adapter
or a cache salt, which the engine caches separately, and for requests that continue the assistant's
message. Source: vLLM's and SGLang's API of /tokenize.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    BodyFields,
    NonStandardBodyFields,
    is_given,
    starts_with,
)
from omni_proxy.routing.inspect.keyed_text import KeyedBodyFields
from omni_proxy.routing.inspect.requirements import AUDIO, IMAGE, VIDEO, Requirements

_MEDIA: Final = IMAGE | AUDIO | VIDEO
# Fields that a chat template uses in addition to the messages.
TEMPLATE_FIELDS: Final = ("tools", "chat_template_kwargs", "add_generation_prompt")
_template_values = attrgetter(*TEMPLATE_FIELDS)
_not_tokenized = attrgetter(
    "system", "input_ids", "token_ids", "lora_path", "cache_salt", "extra_key", "chat_template",
    "documents", "continue_final_message",
)  # fmt: skip
_texts = attrgetter("messages", "prompt", "text")


def tokenize_body(requirements: Requirements) -> bytes | None:
    """None if /tokenize can't return the tokens of the whole prompt."""
    fields = requirements.body_fields
    if fields is None or isinstance(fields, KeyedBodyFields | NonStandardBodyFields):
        return None
    if requirements.large_body_class or requirements.mask & _MEDIA:
        return None
    given = [raw for raw in _texts(fields) if is_given(raw)]
    if len(given) != 1 or any(map(is_given, _not_tokenized(fields))):
        return None
    is_chat = is_given(fields.messages)
    if not starts_with(given[0], b"[" if is_chat else b'"'):
        return None
    values = {"messages" if is_chat else "prompt": given[0]}
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
