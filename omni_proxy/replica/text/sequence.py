"""One request while it is computed: its tokens, its KV, and the text made of them so far.

Invariant: the KV holds the first `kv.length` of `tokens`; all others are pending. Text is released
once, in whole characters, and never a stop string. Dropping the KV loses work, never text.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.llama import BatchPart
from omni_proxy.replica.models.tokenizer import Tokenizer, Utf8Stream
from omni_proxy.replica.text.constraint import Constraint
from omni_proxy.replica.text.logit_shaping import make_sampler
from omni_proxy.replica.text.prompt import Prompt
from omni_proxy.replica.text.stop_strings import StopStrings

FinishReason = Literal["stop", "length"]


class Sequence:
    """`begun` counts how often its computation was started: once, and after each retraction.

    `constraint` is that of the prompt's schema, where it has one.
    """

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, constraint: Constraint | None = None
    ) -> None:
        self.prompt = prompt
        self.tokens = list(prompt.token_ids)
        self.kv: SequenceKV | None = None
        self.begun = self.epoch = 0
        self.cached_tokens = 0
        self.chunks_sent = 0
        self.finish_reason: FinishReason | None = None
        self._stop_hit: str | int | None = None
        self._tokenizer = tokenizer
        self._chooser = make_sampler(prompt.sampling, constraint)
        self._characters = Utf8Stream()
        self._stops = StopStrings(prompt.sampling.stop)
        self._text: list[str] = []
        self._logprobs: list[list[Any]] = []
        self._unsent = 0  # tokens that no chunk has told of

    @property
    def request_id(self) -> str:
        return self.prompt.request_id

    @property
    def computed(self) -> int:
        return 0 if self.kv is None else self.kv.length

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen: 1 while decoding, more in a prefill."""
        return len(self.tokens) - self.computed

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt.token_ids)

    def begin(self, kv: SequenceKV, epoch: int) -> None:
        """Take a KV, empty or with the first tokens, of the prefix cache's present epoch."""
        self.kv, self.epoch = kv, epoch
        self.begun += 1

    def drop_kv(self) -> None:
        self.kv = None

    def part(self, count: int) -> BatchPart:
        """The next `count` pending tokens, for a forward pass that appends them to the KV."""
        if self.kv is None:
            raise RuntimeError(f"request {self.request_id} runs without a KV")
        return self.tokens[self.computed : self.computed + count], self.kv

    def advance(self, logits: Tensor) -> str:
        """Choose the next token from `logits` ([vocabulary]); return the text it releases."""
        token, logprob = self._chooser.choose(logits, self.tokens)
        self.tokens.append(token)
        self._unsent += 1
        if logprob is not None:
            self._logprobs.append(self._told(logprob, token))
        text = self._released_by(token)
        self._text.append(text)
        return text

    def _told(self, logprob: float, token: int) -> list[Any]:
        """[log probability, id, spelling], and the likeliest tokens alike; no spelling unasked.

        A token is spelled in bytes, a control token by its name in a list.
        """
        if self.prompt.sampling.top_logprobs is None:
            return [logprob, token, None]
        likeliest = [[share, each, self._spelled(each)] for share, each in self._chooser.likeliest]
        return [logprob, token, self._spelled(token), likeliest]

    def _spelled(self, token: int) -> bytes | list[str]:
        name = self._tokenizer.control_name(token)
        return self._tokenizer.token_bytes(token) if name is None else [name]

    def _released_by(self, token: int) -> str:
        sampling = self.prompt.sampling
        ends = token in self._tokenizer.eos_ids and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids:
            self.finish_reason, self._stop_hit = "stop", token
            return self._rest()
        text = self._stops.feed(self._characters.feed(self._tokenizer.token_bytes(token)))
        complete = self._chooser.complete  # what comes after it could only be the model's end
        full = self.completion_tokens >= self.prompt.max_new_tokens
        if self._stops.hit is None and (complete or full):
            self.finish_reason = "stop" if complete else "length"
            text += self._rest()
        if self._stops.hit is not None:
            self.finish_reason, self._stop_hit = "stop", self._stops.hit
        return text

    def _rest(self) -> str:
        """What was held back: half a character, or the beginning of a stop string."""
        return self._stops.feed(self._characters.flush()) + self._stops.flush()

    def chunk(self, text: str) -> dict[str, Any]:
        """A piece of a stream: new text, and the tokens since the last piece."""
        first, self._unsent = len(self.tokens) - self._unsent, 0
        self.chunks_sent += 1
        chunk: dict[str, Any] = {"text": text, "token_ids": self.tokens[first:], "modality": "text"}
        if self.prompt.sampling.logprobs:
            chunk["output_token_logprobs"] = self._logprobs[first - len(self.prompt.token_ids) :]
        return chunk

    def result(self, weight_version: str, now_s: float) -> dict[str, Any]:
        """The whole answer of a finished sequence."""
        prompt_tokens = len(self.prompt.token_ids)
        data: dict[str, Any] = {
            "text": "".join(self._text),
            "token_ids": self.tokens[prompt_tokens:],
            "modality": "text",
            "finish_reason": self.finish_reason,
            "stop_hit": self._stop_hit,
            "weight_version": weight_version,
            "engine_time_s": now_s - self.prompt.arrived_s,
            "usage": usage(prompt_tokens, self.completion_tokens, self.cached_tokens),
        }
        if self.prompt.sampling.logprobs:
            data["output_token_logprobs"] = self._logprobs
        return data


def usage(prompt_tokens: int, completion_tokens: int = 0, cached_tokens: int = 0) -> dict[str, Any]:
    """Token counts in OpenAI's words."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
