"""Fields of other servers that change what an answer is, and that nobody here serves.

Invariant: such a field is refused by its name unless it says what happens anyway; a field that
changes nothing of the answer, or is a mere hint, is ignored.
"""

from __future__ import annotations

from typing import Any

from omni_proxy.replica.api.errors import Refused

_FORMATS = "ask for a JSON schema in response_format instead"
UNSERVED = {
    "guided_json": _FORMATS,
    "guided_regex": _FORMATS,
    "guided_choice": _FORMATS,
    "guided_grammar": _FORMATS,
    "structured_outputs": _FORMATS,
    "structural_tag": _FORMATS,
    "json_schema": _FORMATS,
    "regex": _FORMATS,
    "ebnf": _FORMATS,
    "min_tokens": "an answer may be as short as the model wants it",
    "min_new_tokens": "an answer may be as short as the model wants it",
    "bad_words": "give logit_bias for token ids",
    "allowed_token_ids": "give logit_bias for token ids",
    "use_beam_search": "answers are sampled",
    "prompt_logprobs": "log probabilities are those of the answer's tokens",
    "include_stop_str_in_output": "an answer ends before its stop string",
    "continue_final_message": "an answer is a new message",
    "chat_template": "messages are written by the model's own template",
    "truncate_prompt_tokens": "shorten the prompt",
    "web_search_options": "the model has no network",
}
NO_TOOLS = "this server calls no tools; leave it out, or ask for a JSON schema in response_format"
FREE_CHOICES = (None, "auto", "none")


def refuse_unserved(given: dict[str, Any]) -> None:
    """Raises Refused 400 for the first such field of a body."""
    for name, instead in UNSERVED.items():
        if given.get(name):  # null, false, 0 and what is empty ask for nothing
            raise Refused(400, f"{name} is not supported: {instead}")


def refuse_tools(given: dict[str, Any]) -> None:
    """Raises Refused 400 where a body insists on a call; "auto" leaves an answer in text."""
    for name in ("tool_choice", "function_call"):
        if given.get(name) not in FREE_CHOICES:
            raise Refused(400, f"{name} must be auto or none: {NO_TOOLS}")
