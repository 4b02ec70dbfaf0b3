"""The chat template of a model: renders messages as the text that it was trained to continue.

Invariant: a template is Jinja code from the model file, so it is rendered in a sandbox: it gets
messages and token names, but no objects of this program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template rejects these messages, or is invalid; the message is the reason."""


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template rejects the messages: {message}")


class ChatTemplate:
    """Renders messages as the text that the model was trained to continue."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Raises ChatTemplateError for a source that is not a Jinja template."""
        self.source = source
        self._names = {"bos_token": bos_token, "eos_token": eos_token}
        # Chat templates expect these whitespace rules.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is invalid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text, which ends where the model's response begins if a prompt is added.

        Raises ChatTemplateError, for example for a role that the template does not support.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._names
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            if isinstance(error, ChatTemplateError):
                raise
            raise ChatTemplateError(
                f"the chat template fails on these messages: {error}"
            ) from error
