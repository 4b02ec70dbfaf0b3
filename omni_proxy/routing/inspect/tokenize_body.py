"""What an engine's /tokenize needs of a request to say which tokens its prompt is.

Invariant: a body that is returned stands for the whole prompt: messages with everything that the
engine writes into them, or one text. Requests with media, several prompts, an adapter or a cache
salt have none, since the engine caches them apart, and so has a request that continues the
assistant's message. Source: vLLM's and SGLang's API of /tokenize.
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
# What a chat template writes beside the messages.
TEMPLATE_FIELDS: Final = ("tools", "chat_template_kwargs", "add_generation_prompt")
_template_values = attrgetter(*TEMPLATE_FIELDS)
_not_tokenized = attrgetter(
    "system", "input_ids", "token_ids", "lora_path", "cache_salt", "extra_key", "chat_template",
    "documents", "continue_final_message",
)  # fmt: skip
_texts = attrgetter("messages", "prompt", "text")


def tokenize_body(requirements: Requirements) -> bytes | None:
    """None where /tokenize can't say all of the prompt."""
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
    """What makes equal texts other tokens; b"" for most requests."""
    fields = requirements.body_fields
    if fields is None or not any(map(is_given, _template_values(fields))):
        return b""
    return msgspec.json.encode(_template(fields))


def _template(fields: BodyFields) -> dict[str, msgspec.Raw]:
    values = zip(TEMPLATE_FIELDS, _template_values(fields), strict=True)
    return {name: raw for name, raw in values if is_given(raw)}
