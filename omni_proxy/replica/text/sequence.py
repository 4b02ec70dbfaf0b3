"""One request while it is computed: its tokens, its KV, and the text generated so far.

Invariant: the KV holds the first `kv.length` of `tokens`; all others are pending. Dropping the KV
loses computation, never text. Text is released once, in whole characters. It is held back only
while it may begin a stop string (`stop_strings`) or its last character is incomplete.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.llama import BatchPart
from omni_proxy.replica.models.tokenizer import Tokenizer, Utf8Stream
from omni_proxy.replica.text.json_schema import Constraint
from omni_proxy.replica.text.prompt import Prompt
from omni_proxy.replica.text.sampling import make_sampler
from omni_proxy.replica.text.stop_strings import StopStrings

FinishReason = Literal["stop", "length", "abort"]


class Sequence:
    """A request in computation.

    `begun` counts the starts of its computation: the first, and one after each retraction.
    `constraint` is that of the request's schema, if it has one.
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
        self._sampler = make_sampler(prompt.sampling, constraint)
        self._characters = Utf8Stream()
        self._stops = StopStrings(prompt.sampling.stop)
        self._text: list[str] = []
        self._logprobs: list[list[Any]] = []
        self._versions: list[tuple[str, int]] = []  # labels of older weights, and where each ended
        self._unsent = 0  # tokens not in any chunk yet

    @property
    def request_id(self) -> str:
        return self.prompt.request_id

    @property
    def computed(self) -> int:
        return 0 if self.kv is None else self.kv.length

    @property
    def pending(self) -> int:
        """Tokens that the model has not processed: 1 while decoding, more in a prefill."""
        return len(self.tokens) - self.computed

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt.token_ids)

    def begin(self, kv: SequenceKV, epoch: int) -> None:
        """Take a KV, empty or with a cached prefix, of the prefix cache's current epoch."""
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
        token, logprob = self._sampler.choose(logits, self.tokens)
        self.tokens.append(token)
        self._unsent += 1
        if logprob is not None:
            self._logprobs.append(self._logprob_item(logprob, token))
        text = self._release_text(token)
        self._text.append(text)
        return text

    def _logprob_item(self, logprob: float, token: int) -> list[Any]:
        """[log probability, id, text], then the top candidates in the same form.

        The text of a token is None unless requested, a list with its name for a control token, and
        bytes for any other token.
        """
        if self.prompt.sampling.top_logprobs is None:
            return [logprob, token, None]
        likeliest = [
            [candidate_logprob, candidate, self._token_text(candidate)]
            for candidate_logprob, candidate in self._sampler.likeliest
        ]
        return [logprob, token, self._token_text(token), likeliest]

    def _token_text(self, token: int) -> bytes | list[str]:
        name = self._tokenizer.control_name(token)
        return self._tokenizer.token_bytes(token) if name is None else [name]

    def _release_text(self, token: int) -> str:
        sampling = self.prompt.sampling
        ends = token in self._tokenizer.eos_ids and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids:
            self.finish_reason, self._stop_hit = "stop", token
            return self._flush_text()
        text = self._stops.feed(self._characters.feed(self._tokenizer.token_bytes(token)))
        complete = self._sampler.complete  # only an end-of-text token could follow
        full = self.completion_tokens >= self.prompt.max_new_tokens
        if self._stops.hit is None and (complete or full):
            self.finish_reason = "stop" if complete else "length"
            text += self._flush_text()
        if self._stops.hit is not None:
            self.finish_reason, self._stop_hit = "stop", self._stops.hit
        return text

    def _flush_text(self) -> str:
        """Text that is not released yet: an incomplete character, or the start of a stop string."""
        return self._stops.feed(self._characters.flush()) + self._stops.flush()

    def end_early(self) -> None:
        """End the sequence now; text that was held back becomes part of the response."""
        self._text.append(self._flush_text())
        self.finish_reason = "abort"

    def end_version(self, label: str) -> None:
        """Attribute the tokens generated so far to this weight version."""
        self._versions.append((label, self.completion_tokens))

    def _weight_versions(self, label: str) -> list[dict[str, Any]]:
        """The ranges of response tokens by weight version; the last range has version `label`."""
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in [*self._versions, (label, self.completion_tokens)]:
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = start = end
            elif end > start:
                spans.append({"version": version, "start": start, "end": end})
                start = end
        return spans

    def chunk(self, text: str) -> dict[str, Any]:
        """A chunk of the stream: new text, and the tokens since the last chunk."""
        first, self._unsent = len(self.tokens) - self._unsent, 0
        self.chunks_sent += 1
        chunk: dict[str, Any] = {"text": text, "token_ids": self.tokens[first:], "modality": "text"}
        if self.chunks_sent == 1:
            chunk["prompt_tokens"] = len(self.prompt.token_ids)
        if self.prompt.sampling.logprobs:
            chunk["output_token_logprobs"] = self._logprobs[first - len(self.prompt.token_ids) :]
        return chunk

    def result(self, weight_version: str, now_s: float) -> dict[str, Any]:
        """The complete result of a finished sequence."""
        prompt_tokens = len(self.prompt.token_ids)
        data: dict[str, Any] = {
            "text": "".join(self._text),
            "token_ids": self.tokens[prompt_tokens:],
            "modality": "text",
            "finish_reason": self.finish_reason,
            "stop_hit": self._stop_hit,
            "weight_version": weight_version,
            "weight_versions": self._weight_versions(weight_version),
            "engine_time_s": now_s - self.prompt.arrived_s,
            "usage": usage(prompt_tokens, self.completion_tokens, self.cached_tokens),
        }
        if self.prompt.sampling.logprobs:
            data["output_token_logprobs"] = self._logprobs
        return data


def usage(prompt_tokens: int, completion_tokens: int = 0, cached_tokens: int = 0) -> dict[str, Any]:
    """Token counts under OpenAI's names."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
