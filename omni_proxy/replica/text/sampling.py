"""How the next token is chosen: what a caller may ask for, and one chooser per request.

Invariant: a choice depends on the request's own logits, tokens and generator alone, so the same
seed gives the same text whatever else is computed beside it. Every drawn token takes as many
random numbers as the vocabulary has tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# The kept tokens are looked for among so many best ones before the whole vocabulary is sorted:
# sorting 49152 logits costs 3 ms, finding the best 512 costs a tenth of that.
TOP_CANDIDATES = 512
MAX_STOPS = 256  # each is looked for after every token
# Below this temperature logits would overflow, and the likeliest token is drawn anyway.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20  # OpenAI's bound
MAX_BIASES = 1024
MAX_TOKEN_ID_DIGITS = 10


class SamplingError(ValueError):
    """The caller asked for something that cannot be; the text names the field and its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What one caller asks for. `top_k` below 1 means all; `max_new_tokens` None means the rest.

    `top_logprobs` asks for so many likeliest tokens beside each chosen one, and for the spelling of
    all of them. `logit_bias` is added to the logits of token ids. `json_schema` is a JSON schema as
    text; "" leaves the answer free.
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
        """Is a logit to be changed by more than penalty and temperature, before it is chosen?"""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.json_schema
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def parse_sampling(params: Mapping[str, Any], stage: str) -> Sampling:
    """Read a request's `params`; those in `stage_sampling[stage]` win over the common ones.

    Raises SamplingError.
    """
    own = (params.get("stage_sampling") or {}).get(stage) or {}
    if not isinstance(own, Mapping):
        raise SamplingError(f"stage_sampling.{stage} must be an object, not {own!r}")
    unknown = sorted(set(map(str, own)) - _FIELDS.keys())
    if unknown:
        known = ", ".join(_FIELDS)
        raise SamplingError(f"stage_sampling.{stage} has no field {unknown[0]!r}; it has {known}")
    asked = {**{name: params.get(name) for name in _FIELDS}, **own}
    return Sampling(
        **{name: _FIELDS[name](name, value) for name, value in asked.items() if value is not None}
    )


def _number(holds: Callable[[float], bool], wanted: str) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        # A bool is an int to Python, never to a caller.
        right = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            number = float(value) if right else math.nan
        except OverflowError:  # a whole number may be beyond all floats
            number = math.inf
        if not math.isfinite(number) or not holds(number):
            raise SamplingError(f"{name} must be a number {wanted}, not {value!r:.40}")
        return number

    return check


def _integer(low: int, high: int, wanted: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise SamplingError(f"{name} must be a whole number {wanted}, not {value!r}")
        return int(value)

    return check


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _listed(name, value)
    strings = tuple(strings)
    if len(strings) > MAX_STOPS:
        raise SamplingError(f"{name} holds {len(strings)} strings; at most {MAX_STOPS} are taken")
    for each in strings:
        if not isinstance(each, str) or not each:
            raise SamplingError(f"{name} must hold strings that are not empty, not {each!r}")
    return strings


def _ids(name: str, value: Any) -> frozenset[int]:
    check = _integer(0, 2**63 - 1, "of at least 0")
    return frozenset(check(f"each of {name}", each) for each in _listed(name, value))


def _listed(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise SamplingError(f"{name} must be a list, not {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SamplingError(f"{name} must be true or false, not {value!r}")
    return value


def parse_biases(name: str, value: Any) -> dict[int, float]:
    """Token ids with their biases; ids may be texts, as keys of JSON are. Raises SamplingError."""
    if not isinstance(value, Mapping):
        raise SamplingError(f"{name} must be an object of token ids and numbers, not {value!r:.40}")
    if len(value) > MAX_BIASES:
        raise SamplingError(f"{name} holds {len(value)} tokens; at most {MAX_BIASES} are taken")
    check = _number(lambda bias: -100 <= bias <= 100, "within -100 and 100")
    found = {}
    for key, bias in value.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) < MAX_TOKEN_ID_DIGITS):
            raise SamplingError(f"{name}: each key must be a token id, not {key!r:.40}")
        found[int(text)] = check(f"{name}.{text}", bias)
    return found


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
    """Chooses one request's tokens, in their order.

    `likeliest` holds, where `top_logprobs` asks for them, the best tokens of the last choice with
    their log probabilities. `complete`: no token can follow the last one.
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
        """Return the token that follows `tokens` and, where asked for, its log probability.

        `logits` is [vocabulary] and stays as it is. The log probability is the token's in the
        distribution after penalties, bias, constraint and temperature, before anything was
        filtered away by top-k, top-p or min-p.
        """
        wanted = self._sampling
        logits = self._shaped(logits.float(), tokens)
        if wanted.greedy:
            token = int(logits.argmax())
        else:
            logits = logits / wanted.temperature
            token = self._draw(logits)
        if not wanted.logprobs:
            return token, None
        shares = logits.logsumexp(-1)
        if wanted.top_logprobs:
            best, ids = logits.topk(min(wanted.top_logprobs, len(logits)))
            told = zip((best - shares).tolist(), ids.tolist(), strict=True)
            self.likeliest = [each for each in told if math.isfinite(each[0])]
        return token, float(logits[token] - shares)

    def _shaped(self, logits: Tensor, tokens: Iterable[int]) -> Tensor:
        """The logits that tokens are chosen from, in new memory where they change."""
        return penalised(logits, tokens, self._sampling.repetition_penalty)

    def _draw(self, logits: Tensor) -> int:
        """Draw by a race: every token gets a random handicap of its own, and the best one wins.

        That draws each with its probability, as walking along their sum does. But logits that
        differ in their last bits, as they do from batch to batch, then change the winner only
        where two are level, not wherever the sum has moved a little: on two models, 1 of 16 and
        1 of 6 seeded texts changed with the batch that way.
        """
        import torch

        uniform = torch.rand(len(logits), generator=self._generator, dtype=torch.float64)
        kept = kept_tokens(logits, self._sampling)
        if kept is not None:
            logits, uniform = logits[kept], uniform[kept]
        winner = int((logits - uniform.log_().neg_().log_()).argmax())
        return winner if kept is None else int(kept[winner])


def penalised(logits: Tensor, tokens: Iterable[int], penalty: float) -> Tensor:
    """Make every token that occurred less likely: positive logits shrink, negative ones grow."""
    if penalty == 1.0:
        return logits
    import torch

    seen = torch.tensor(sorted(set(tokens)), dtype=torch.long)
    old = logits[seen]
    logits = logits.clone()
    logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    return logits


def kept_tokens(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """Return the ids that top-k, then top-p, then min-p leave, ascending; None means all.

    Each filter takes the distribution as the one before it left it; the likeliest token stays.
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
    """Which of the `best` logits (descending) top-p and min-p keep; shares are shares `among`."""
    shares = (best.double() - among.double().logsumexp(-1)).exp()
    keep = shares >= sampling.min_p * shares[0]
    if sampling.top_p < 1.0:
        # A token stays while those before it have not reached the share.
        keep &= shares.cumsum(-1) - shares < sampling.top_p
    keep[0] = True
    return keep
