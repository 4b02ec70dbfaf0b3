"""The stage that writes the prompt: messages through the chat template, text to token ids.

Invariant: every token id it passes on came from this model's tokenizer, or from the caller as an
id. What the pipeline cannot see is refused here, not left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_proxy.replica.model_file import MODELS, cache_folder, fetch
from omni_proxy.replica.models.chat_template import ChatTemplate, ChatTemplateError
from omni_proxy.replica.models.gguf import GGUFFile
from omni_proxy.replica.models.smollm2 import load_chat_template, load_tokenizer
from omni_proxy.replica.models.text_model import FILED
from omni_proxy.replica.models.tiny import CHAT_TEMPLATE, TinyTokenizer
from omni_proxy.replica.models.tokenizer import Tokenizer
from omni_proxy.replica.pipeline.messages import StagePayload
from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerFault,
    EmitChunk,
    FunctionScheduler,
)

log = logging.getLogger(__name__)

AUDIO_PARTS = frozenset({"audio", "input_audio", "audio_url"})
NO_EYES = (
    "{} cannot be used: no stage of this pipeline sees; send its text instead, or run a pipeline "
    "with a vision stage (--pipeline FILE.toml)"
)
NO_EARS = (
    "audio cannot be used: no stage of this pipeline hears; start the server with "
    "--transcription whisper-tiny"
)


def build(stage_name: str, *, model: str = "tiny", concurrency: int = 1) -> FunctionScheduler:
    """Load the tokenizer and the template of `model`, not its weights, and return the stage."""
    return FunctionScheduler(
        stage_name, prompts_of(model).prepared, concurrency=concurrency, marks="preprocess"
    )


def prompts_of(model: str) -> Prompts:
    """Raises ValueError for an unknown model, GGUFError or ModelFileError for an unusable file."""
    if model == "tiny":
        return Prompts(TinyTokenizer(), ChatTemplate(CHAT_TEMPLATE))
    if model in FILED:
        path = fetch(MODELS[model], cache_folder(os.environ), log.info)
    elif model.endswith(".gguf"):
        path = Path(model)
    else:
        known = ", ".join(("tiny", *FILED))
        raise ValueError(f"no text model is called {model!r}: {known}, or a path to a .gguf file")
    file = GGUFFile(path)
    return Prompts(load_tokenizer(file), load_chat_template(file))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The stage's function over one model's tokenizer and template."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def prepared(
        self, payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> dict[str, Any]:
        """Return `{"token_ids": [...]}`; raises CallerFault."""
        data = payload.data if isinstance(payload.data, Mapping) else {}
        inputs = data.get("raw_inputs", payload.request.inputs)
        if isinstance(inputs, Mapping):
            for kind in ("images", "videos"):
                if inputs.get(kind):
                    raise CallerFault(NO_EYES.format(kind))
        return {"token_ids": self._token_ids(inputs, data.get("transcripts") or ())}

    def _token_ids(self, inputs: Any, transcripts: Sequence[str]) -> list[int]:
        if isinstance(inputs, Mapping):
            if "messages" in inputs:
                # The template's control tokens have to become control tokens.
                text = self._text(inputs["messages"], transcripts)
                return self.tokenizer.encode(text, special=True)
            inputs = inputs.get("prompt")
        if isinstance(inputs, str):
            return self.tokenizer.encode(inputs, special=True)
        if isinstance(inputs, Sequence) and all(type(token) is int for token in inputs):
            return list(inputs)
        raise CallerFault("the prompt is neither text nor a list of token ids nor messages")

    def _text(self, messages: Any, transcripts: Sequence[str]) -> str:
        if not isinstance(messages, Sequence) or not messages:
            raise CallerFault("messages must be a list with at least one message")
        heard = iter(transcripts)

        def next_transcript() -> str:
            try:
                return next(heard)
            except StopIteration:
                raise CallerFault(NO_EARS) from None

        spelled = [_spelled(message, next_transcript) for message in messages]
        try:
            return self.template.render(spelled)
        except ChatTemplateError as error:
            raise CallerFault(str(error)) from error


def _spelled(message: Any, next_transcript: Callable[[], str]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CallerFault("a message must have a role and content")
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_part(part, next_transcript) for part in content)
    return {**message, "content": content}


def _part(part: Any, next_transcript: Callable[[], str]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in AUDIO_PARTS:
        return next_transcript()
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise CallerFault(NO_EYES.format(f"a content part of type {kind}"))
