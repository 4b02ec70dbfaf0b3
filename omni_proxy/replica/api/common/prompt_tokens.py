"""The model's tokenizer and chat template for routes that count or decode tokens.

Invariant: they are loaded once, in a thread, for the first request that needs them. The tokens are
those that the pipeline's prompt stage computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.pipeline.requests import PromptMessage
from omni_proxy.replica.pipeline.stage import CallerError

if TYPE_CHECKING:
    from omni_proxy.replica.stages.prepare import PromptBuilder

NO_TOKENIZER = "this server was started without a text model, so it has no tokenizer"


class PromptTokens:
    """Counts and decodes tokens of `model`, a model's name or file; "" if there is none."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = trio.Lock()
        self._builder: PromptBuilder | None = None

    async def of_text(self, text: str) -> list[int]:
        """Tokens of a text. Raises DetailError 501 without a model, 400 for an invalid prompt."""
        builder = await self._loaded()
        return await trio.to_thread.run_sync(_checked, builder.text_tokens, text)

    async def of_messages(
        self, messages: Sequence[PromptMessage], *, generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of a chat, without those of its media. Raises DetailError."""
        builder = await self._loaded()
        plain = [{"role": message.role, "content": message.content} for message in messages]

        def tokens() -> list[int]:
            return builder.message_tokens(plain, generation_prompt=generation_prompt)

        return await trio.to_thread.run_sync(_checked, tokens)

    async def spelled(self, ids: Iterable[int]) -> list[str]:
        """The text of each token, or the name of a control token. Raises DetailError."""
        tokenizer = (await self._loaded()).tokenizer
        pieces = []
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise DetailError(
                    400,
                    f"Token id {token} is out of vocabulary: the model's tokens are 0 to "
                    f"{tokenizer.vocab_size - 1}",
                )
            name = tokenizer.control_name(token)
            text = tokenizer.token_bytes(token).decode("utf-8", errors="replace")
            pieces.append(text if name is None else name)
        return pieces

    async def text(self, ids: Sequence[int], *, control_names: bool) -> str:
        """The text of these tokens together; a character may span several tokens."""
        names = await self.spelled(ids)
        tokenizer = (await self._loaded()).tokenizer
        parts, run = [], list[int]()
        for token, name in zip(ids, names, strict=True):
            if control_names and tokenizer.control_name(token) is not None:
                parts += [tokenizer.decode(run), name]
                run = []
            else:
                run.append(token)
        return "".join([*parts, tokenizer.decode(run)])

    async def context(self) -> int:
        """Maximum number of tokens of a prompt and its response together."""
        return (await self._loaded()).context

    async def _loaded(self) -> PromptBuilder:
        if self._builder is None:
            if not self._model:
                raise DetailError(501, NO_TOKENIZER)
            async with self._lock:
                if self._builder is None:
                    self._builder = await trio.to_thread.run_sync(_load, self._model)
        return self._builder


def _load(model: str) -> PromptBuilder:
    # Import it only here: most servers never tokenize for a route.
    from omni_proxy.replica.stages.prepare import load_prompt_builder

    return load_prompt_builder(model)


def _checked(function: object, *arguments: object) -> list[int]:
    assert callable(function)
    try:
        tokens: list[int] = function(*arguments)
    except CallerError as error:
        raise DetailError(400, str(error)) from None
    return tokens
