"""Workloads: requests with arrival times, prompt blocks and output lengths.

A prompt is a sequence of blocks of `block_tokens` tokens (the last one may be shorter). An equal
block id means equal text up to the block's end, so leading blocks with equal ids are a common
prefix. A workload may add requests when one ends: the next turn of a chat follows the answer.
Invariant: equal arguments and an equal seed give the same requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final, Protocol

TRACE_BLOCK_TOKENS: Final = 512
BLOCK_TOKENS: Final = 64  # of the generated workloads below


@dataclass(slots=True, eq=False)
class Request:
    """One request. `blocks` empty: its prompt shares no prefix with any other."""

    at: float  # seconds since the start of the workload
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS
    session: str = ""
    model: str = ""

    @property
    def block_count(self) -> int:
        return len(self.blocks) or -(-self.input_tokens // self.block_tokens)

    def block_size(self, place: int) -> int:
        """Tokens of one block; the last block of a prompt has the remaining ones."""
        if place + 1 < len(self.blocks):
            return self.block_tokens
        return max(0, self.input_tokens - place * self.block_tokens)


class Workload(Protocol):
    """A source of requests."""

    @property
    def requests(self) -> Sequence[Request]:
        """The requests that are known before the run, by arrival time."""

    def next_after(self, request: Request, now: float) -> Iterable[Request]:
        """Requests that follow `request`, which has ended at `now`."""


class OpenLoop:
    """Requests that arrive at given times, independent of each other."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = sorted(requests, key=lambda request: request.at)

    def next_after(self, request: Request, now: float) -> Iterable[Request]:
        return ()


@dataclass(slots=True, eq=False)
class Turns:
    """Remaining turns of a conversation: (think seconds, new prompt tokens, output tokens) each."""

    session: str
    left: list[tuple[float, int, int]]


class Conversations:
    """Sessions of several turns: each prompt is the previous prompt, its answer and new text, and
    is sent a think time after the answer."""

    def __init__(
        self, first: Iterable[Request], turns: Sequence[Turns], names: Iterable[int]
    ) -> None:
        self.requests = sorted(first, key=lambda request: request.at)
        self._names = iter(names)
        self._turns = {turn.session: turn for turn in turns}

    def next_after(self, request: Request, now: float) -> Iterable[Request]:
        turns = self._turns.get(request.session)
        if turns is None or not turns.left:
            return ()
        think_secs, new_tokens, output_tokens = turns.left.pop(0)
        size = request.block_tokens
        tokens = request.input_tokens + request.output_tokens + new_tokens
        whole = request.input_tokens // size  # a partial last block gets more text and a new id
        blocks = request.blocks[:whole] + tuple(
            next(self._names) for _ in range(-(-tokens // size) - whole)
        )
        return (Request(now + think_secs, tokens, output_tokens, blocks, size, request.session),)


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a workload, independent of the fleet."""

    requests: int
    mean_input_tokens: float
    mean_output_tokens: float
    duration_secs: float
    best_possible_hit_rate: float
    best_possible_token_rate: float = 0.0


@dataclass(slots=True)
class FactsCounter:
    """Counts requests in order of arrival. The best possible hit rate is that of one worker with
    unlimited cache: the share of leading blocks, or of their tokens, that are also in an earlier
    prompt."""

    requests: int = 0
    _input: int = 0
    _output: int = 0
    _blocks: int = 0
    _seen_blocks: int = 0
    _seen_tokens: int = 0
    _first_at: float = 0.0
    _last_at: float = 0.0
    _known: set[int] = field(default_factory=set)

    def add(self, request: Request) -> None:
        if not self.requests:
            self._first_at = request.at
        self.requests += 1
        self._input += request.input_tokens
        self._output += request.output_tokens
        self._last_at = max(self._last_at, request.at)
        self._blocks += request.block_count
        seen = self._known
        leading = True
        for place, block in enumerate(request.blocks):
            leading = leading and block in seen
            if leading:
                self._seen_blocks += 1
                self._seen_tokens += request.block_size(place)
            seen.add(block)

    def facts(self) -> Facts:
        requests = max(1, self.requests)
        return Facts(
            self.requests,
            self._input / requests,
            self._output / requests,
            self._last_at - self._first_at,
            self._seen_blocks / max(1, self._blocks),
            self._seen_tokens / max(1, self._input),
        )


# Generated workloads: functions of the number of requests, the number of workers (to which the
# arrival rate is proportional; it may be fractional) and a random generator.

RATE_PER_WORKER: Final = 2.0  # requests a second, for prompts of about two thousand tokens


def _lengths(random: Random, mean: float) -> int:
    """A positive length with a long tail: log-normal, like those of prompts and answers."""
    return max(1, round(mean * random.lognormvariate(-0.32, 0.8)))


def _arrivals(random: Random, rate: float) -> Iterable[float]:
    arrival = 0.0
    while True:
        yield arrival
        arrival += random.expovariate(rate)


def _names(number: int, names: Iterable[int]) -> tuple[int, ...]:
    iterator = iter(names)
    return tuple(next(iterator) for _ in range(number))


def uniform(requests: int, workers: float, random: Random) -> Workload:
    """Prompts without common prefixes, at a steady rate."""
    arrivals = _arrivals(random, RATE_PER_WORKER * workers)
    return OpenLoop(
        (
            Request(arrival, _lengths(random, 1024), _lengths(random, 128), (), BLOCK_TOKENS)
            for arrival, _ in zip(arrivals, range(requests), strict=False)
        ),
    )


def bursts(requests: int, workers: float, random: Random) -> Workload:
    """Like `uniform`, in bursts: ten times the mean rate for one second out of ten."""
    arrivals = _arrivals(random, RATE_PER_WORKER * workers * 10)
    return OpenLoop(
        (
            Request(
                arrival // 1.0 * 10 + arrival % 1.0,
                _lengths(random, 1024),
                _lengths(random, 128),
                (),
                BLOCK_TOKENS,
            )
            for arrival, _ in zip(arrivals, range(requests), strict=False)
        ),
    )


def shared(requests: int, workers: float, random: Random) -> Workload:
    """Sixty-four system prompts of 2,048 tokens, some much more frequent than others, each followed
    by a short question."""
    names = count(1)
    size = 2048 // BLOCK_TOKENS
    prompts = [_names(size, names) for _ in range(64)]
    weights = [1 / rank for rank in range(1, 65)]
    arrivals = _arrivals(random, RATE_PER_WORKER * workers)
    generated = []
    for arrival, _ in zip(arrivals, range(requests), strict=False):
        question = _lengths(random, 160)
        prompt = random.choices(prompts, weights)[0]
        blocks = prompt + _names(-(-question // BLOCK_TOKENS), names)
        generated.append(
            Request(arrival, 2048 + question, _lengths(random, 128), blocks, BLOCK_TOKENS)
        )
    return OpenLoop(generated)


@dataclass(frozen=True, slots=True)
class _Chat:
    """One kind of conversation. Lengths are mean tokens; all have the same system prompt."""

    turns: tuple[int, int]  # fewest and most
    think_secs: float  # mean time between an answer and the next prompt
    system: int
    first: int  # of the first message
    later: int  # of each later one
    output: int


def _conversations(chat: _Chat, requests: int, workers: float, random: Random) -> Workload:
    names = count(1)
    system_blocks = _names(chat.system // BLOCK_TOKENS, names)
    arrivals = _arrivals(random, RATE_PER_WORKER * workers / (sum(chat.turns) / 2))
    openings: list[Request] = []
    rest: list[Turns] = []
    turn_total = 0
    for arrival in arrivals:
        number = min(random.randint(*chat.turns), requests - turn_total)
        if number <= 0:
            break
        turn_total += number
        session = f"session-{len(openings)}"
        tokens = chat.system + _lengths(random, chat.first)
        blocks = system_blocks + _names(-(-tokens // BLOCK_TOKENS) - len(system_blocks), names)
        output = _lengths(random, chat.output)
        openings.append(Request(arrival, tokens, output, blocks, BLOCK_TOKENS, session))
        later_turns = [
            (
                random.expovariate(1 / chat.think_secs),
                _lengths(random, chat.later),
                _lengths(random, chat.output),
            )
            for _ in range(number - 1)
        ]
        rest.append(Turns(session, later_turns))
    return Conversations(openings, rest, names)


def chats(requests: int, workers: float, random: Random) -> Workload:
    """Chats of people: one to nine turns, with about 20 s between them for reading and writing."""
    chat = _Chat((1, 9), think_secs=20.0, system=256, first=320, later=96, output=256)
    return _conversations(chat, requests, workers, random)


def agents(requests: int, workers: float, random: Random) -> Workload:
    """Agents with tools: a long common prompt, ten to thirty short turns with long tool results,
    about one second between them."""
    chat = _Chat((10, 30), think_secs=1.0, system=4096, first=512, later=640, output=96)
    return _conversations(chat, requests, workers, random)


GROUP: Final = 8  # answers to one prompt


def rollouts(requests: int, workers: float, random: Random) -> Workload:
    """Reinforcement learning: every minute a batch arrives at the same moment, with eight requests
    for each prompt, and long answers."""
    names = count(1)
    generated: list[Request] = []
    batch = 64 * workers
    while len(generated) < requests:
        arrival = 60.0 * (len(generated) // batch)
        tokens = _lengths(random, 512)
        blocks = _names(-(-tokens // BLOCK_TOKENS), names)
        generated += (
            Request(arrival, tokens, _lengths(random, 768), blocks, BLOCK_TOKENS)
            for _ in range(min(GROUP, requests - len(generated)))
        )
    return OpenLoop(generated)


WORKLOADS: Final = {
    made.__name__: made for made in (shared, chats, agents, uniform, bursts, rollouts)
}
