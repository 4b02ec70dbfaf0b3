"""Sampling: parameters of a request, and the sampler that chooses its tokens.

Invariant: a choice depends only on the request's own logits, tokens and generator, so the same seed
gives the same text regardless of other requests in the batch. Every sampled token uses as many
random numbers as the vocabulary has tokens. A request without biases, penalties and constraint uses
the plain `TokenSampler`. The constraint of a JSON schema is applied last: no bias and no penalty
can select a token that it forbids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

# Top-p and min-p look at this many top tokens first: cheaper than sorting the whole vocabulary.
TOP_CANDIDATES = 512
MAX_STOPS = 256  # each is searched for after every token
# Below this temperature logits would overflow; the most likely token is chosen.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20  # OpenAI's bound
MAX_BIASES = 1024
MAX_TOKEN_ID_DIGITS = 10


class SamplingError(ValueError):
    """Invalid sampling parameters; the text names the field and its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters of one request.

    `top_k` below 1 means all tokens; `max_new_tokens` None means up to the context length.
    `top_logprobs` requests that many top candidates for each chosen token, with their text.
    `logit_bias` is added to the logits of token ids. `json_schema` is a JSON schema as text; ""
    leaves the response unconstrained.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    ignore_eos: bool = False
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str = ""

    @property
    def shaped(self) -> bool:
        """Whether logits are changed by more than repetition penalty and temperature."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.json_schema
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def parse_sampling(params: Mapping[str, Any], stage: str) -> Sampling:
    """Parse a request's `params`; those in `stage_sampling[stage]` override the common ones.

    Raises SamplingError.
    """
    stage_params = (params.get("stage_sampling") or {}).get(stage) or {}
    if not isinstance(stage_params, Mapping):
        raise SamplingError(f"stage_sampling.{stage} must be an object, not {stage_params!r}")
    unknown = sorted(set(map(str, stage_params)) - _FIELDS.keys())
    if unknown:
        names = ", ".join(_FIELDS)
        raise SamplingError(f"stage_sampling.{stage} has no field {unknown[0]!r}; it has {names}")
    merged = {**{name: params.get(name) for name in _FIELDS}, **stage_params}
    return Sampling(
        **{name: _FIELDS[name](name, value) for name, value in merged.items() if value is not None}
    )


def _number(accepts: Callable[[float], bool], range_text: str) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        # A bool is an int in Python, but not in JSON.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            number = float(value) if is_number else math.nan
        except OverflowError:  # an int may exceed the range of floats
            number = math.inf
        if not math.isfinite(number) or not accepts(number):
            raise SamplingError(f"{name} must be a number {range_text}, not {value!r:.40}")
        return number

    return check


def _integer(low: int, high: int, range_text: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_integer or not low <= value <= high:
            raise SamplingError(f"{name} must be a whole number {range_text}, not {value!r}")
        return int(value)

    return check


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _listed(name, value)
    strings = tuple(strings)
    if len(strings) > MAX_STOPS:
        raise SamplingError(f"{name} holds {len(strings)} strings; at most {MAX_STOPS} are allowed")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise SamplingError(f"{name} must hold strings that are not empty, not {text!r}")
    return strings


def _ids(name: str, value: Any) -> frozenset[int]:
    check = _integer(0, 2**63 - 1, "of at least 0")
    return frozenset(check(f"each of {name}", token_id) for token_id in _listed(name, value))


def _listed(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise SamplingError(f"{name} must be a list, not {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SamplingError(f"{name} must be true or false, not {value!r}")
    return value


def parse_biases(name: str, value: Any) -> dict[int, float]:
    """Token ids with their biases; ids may be strings, as JSON keys are. Raises SamplingError."""
    if not isinstance(value, Mapping):
        raise SamplingError(f"{name} must be an object of token ids and numbers, not {value!r:.40}")
    if len(value) > MAX_BIASES:
        raise SamplingError(f"{name} holds {len(value)} tokens; at most {MAX_BIASES} are allowed")
    check = _number(lambda bias: -100 <= bias <= 100, "within -100 and 100")
    biases = {}
    for key, bias in value.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) < MAX_TOKEN_ID_DIGITS):
            raise SamplingError(f"{name}: each key must be a token id, not {key!r:.40}")
        biases[int(text)] = check(f"{name}.{text}", bias)
    return biases


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SamplingError(f"{name} must be a string, not {value!r:.40}")
    return value


_FIELDS: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": _number(lambda value: value >= 0, "of at least 0"),
    "top_p": _number(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": _integer(-1, 2**31 - 1, "of at least 1, or -1 for all"),
    "min_p": _number(lambda value: 0 <= value <= 1, "within 0 and 1"),
    "repetition_penalty": _number(lambda value: value > 0, "above 0"),
    "seed": _integer(-(2**63), 2**63 - 1, "of 64 bits"),
    "max_new_tokens": _integer(1, 2**63 - 1, "of at least 1"),
    "stop": _strings,
    "stop_token_ids": _ids,
    "logprobs": _flag,
    "ignore_eos": _flag,
    "top_logprobs": _integer(0, MAX_LOGPROBS, f"within 0 and {MAX_LOGPROBS}"),
    "presence_penalty": _number(lambda value: -2 <= value <= 2, "within -2 and 2"),
    "frequency_penalty": _number(lambda value: -2 <= value <= 2, "within -2 and 2"),
    "logit_bias": parse_biases,
    "json_schema": _text,
}


class TokenSampler:
    """Chooses one request's tokens, in order.

    `likeliest` holds, if `top_logprobs` is set, the top candidates of the last choice with their
    log probabilities. `complete`: no token can follow the last one.
    """

    __slots__ = ("_generator", "_sampling", "likeliest")

    complete = False

    def __init__(self, sampling: Sampling) -> None:
        import torch

        self._sampling = sampling
        self.likeliest: list[tuple[float, int]] = []
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, tokens: Iterable[int]) -> tuple[int, float | None]:
        """Return the token that follows `tokens` and, if requested, its log probability.

        `logits` is [vocabulary] and is not changed. The log probability is that of the distribution
        after penalties, bias, constraint and temperature, before top-k, top-p and min-p.
        """
        sampling = self._sampling
        logits = self._shaped(logits.float(), tokens)
        if sampling.greedy:
            token = int(logits.argmax())
        else:
            logits = logits / sampling.temperature
            token = self._draw(logits)
        if not sampling.logprobs:
            return token, None
        log_total = logits.logsumexp(-1)
        if sampling.top_logprobs:
            best, ids = logits.topk(min(sampling.top_logprobs, len(logits)))
            candidates = zip((best - log_total).tolist(), ids.tolist(), strict=True)
            self.likeliest = [candidate for candidate in candidates if math.isfinite(candidate[0])]
        return token, float(logits[token] - log_total)

    def _shaped(self, logits: Tensor, tokens: Iterable[int]) -> Tensor:
        """The logits to choose from, in new memory if they change."""
        return penalised(logits, tokens, self._sampling.repetition_penalty)

    def _draw(self, logits: Tensor) -> int:
        """Sample by the Gumbel-max trick: add random noise to each logit, take the maximum.

        Each token is sampled with its probability, as in inverse transform sampling. Logits differ
        in their last bits between batches. Here that changes the result only if two tokens are
        nearly equal; with a cumulative sum any small shift could change it.
        """
        import torch

        uniform = torch.rand(len(logits), generator=self._generator, dtype=torch.float64)
        kept = kept_tokens(logits, self._sampling)
        if kept is not None:
            logits, uniform = logits[kept], uniform[kept]
        winner = int((logits - uniform.log_().neg_().log_()).argmax())
        return winner if kept is None else int(kept[winner])


def penalised(logits: Tensor, tokens: Iterable[int], penalty: float) -> Tensor:
    """Apply the repetition penalty: positive logits of seen tokens shrink, negative ones grow."""
    if penalty == 1.0:
        return logits
    import torch

    seen = torch.tensor(sorted(set(tokens)), dtype=torch.long)
    old = logits[seen]
    logits = logits.clone()
    logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    return logits


def kept_tokens(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """Return the ids that pass top-k, then top-p, then min-p, ascending; None means all.

    Each filter uses the distribution that the one before it left; the most likely token always
    stays.
    """
    vocabulary = len(logits)
    if 0 < sampling.top_k < vocabulary:
        best, ids = logits.topk(sampling.top_k)
        return ids[_kept(best, best, sampling)].sort().values
    if sampling.top_p >= 1.0 and sampling.min_p == 0.0:
        return None
    best, ids = logits.topk(min(TOP_CANDIDATES, vocabulary))
    keep = _kept(best, logits, sampling)
    if keep[-1] and len(best) < vocabulary:
        best, ids = logits.topk(vocabulary)
        keep = _kept(best, logits, sampling)
    return ids[keep].sort().values


def _kept(best: Tensor, among: Tensor, sampling: Sampling) -> Tensor:
    """Mask of the logits in `best` (descending) that pass top-p and min-p.

    A token's probability is its share of the distribution that `among` holds the logits of.
    """
    shares = (best.double() - among.double().logsumexp(-1)).exp()
    keep = shares >= sampling.min_p * shares[0]
    if sampling.top_p < 1.0:
        # A token stays while the tokens before it have not reached top_p.
        keep &= shares.cumsum(-1) - shares < sampling.top_p
    keep[0] = True
    return keep


class TokenConstraint(Protocol):
    """The tokens that may follow, for output that matches a JSON schema."""

    @property
    def complete(self) -> bool:
        """Whether no token can follow."""

    def allowed(self) -> Tensor:
        """Mask over the vocabulary of the tokens that may follow."""

    def accept(self, token: int) -> None:
        """Advance by `token`, one of those allowed."""


def make_sampler(sampling: Sampling, constraint: TokenConstraint | None) -> TokenSampler:
    """Return the sampler of one request; `constraint` is that of its schema, if it has one."""
    if sampling.shaped:
        return ShapedTokenSampler(sampling, constraint)
    return TokenSampler(sampling)


class ShapedTokenSampler(TokenSampler):
    """Counts the tokens it has chosen, for the penalties; tokens of the prompt are not counted."""

    __slots__ = ("_biased", "_biases", "_constraint", "_counts")

    def __init__(self, sampling: Sampling, constraint: TokenConstraint | None) -> None:
        import torch

        super().__init__(sampling)
        self._constraint = constraint
        self._counts: dict[int, int] = {}
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()))

    @property
    def complete(self) -> bool:  # type: ignore[override]  # a constant in the plain sampler
        return self._constraint is not None and self._constraint.complete

    def choose(self, logits: Tensor, tokens: Iterable[int]) -> tuple[int, float | None]:
        """As in TokenSampler. Raises ConstraintError if no token is allowed."""
        token, logprob = super().choose(logits, tokens)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.accept(token)
        return token, logprob

    def _shaped(self, logits: Tensor, tokens: Iterable[int]) -> Tensor:
        logits = super()._shaped(logits, tokens).clone()
        self._penalise(logits)
        # The ids are keys of a dict, so none occurs twice and indexed addition is correct.
        logits[self._biased] += self._biases
        if self._constraint is not None:
            logits[~self._constraint.allowed()] = float("-inf")
        return logits

    def _penalise(self, logits: Tensor) -> None:
        """Presence penalty once per token, frequency penalty per occurrence."""
        import torch

        sampling = self._sampling
        if not self._counts or not (sampling.presence_penalty or sampling.frequency_penalty):
            return
        seen = torch.tensor(list(self._counts), dtype=torch.long)
        counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
        logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
