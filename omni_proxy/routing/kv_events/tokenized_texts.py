"""Texts with tokens from an engine's /tokenize, and the queue of texts to tokenize.

    a text was sent -> request -> /tokenize of its worker -> tokens -> keys of its blocks

A later text with the same prefix starts with the same blocks. Invariants: the newest texts are
kept, in bounded memory; the number of calls is bounded by the use of earlier results; an engine
that does not answer is not queried for a while. Pure: `dataplane.engine_calls` sends the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from omni_proxy.routing.inspect.prefix_text import LIMIT
from omni_proxy.routing.kv_events.block_keys import PromptBlocks, encode_token_ids
from omni_proxy.routing.prefix_tree import PrefixTree
from omni_proxy.routing.token_id_text import TokenIdText
from omni_proxy.routing.tree_key import text_length

# Length of texts to tokenize: at least about a thousand tokens, and not cut.
MIN_BYTES: Final = 4096
MAX_BYTES: Final = LIMIT - 2
MAX_TEXTS: Final = 256
MAX_TOKENS: Final = 1 << 20  # of all texts
MAX_QUEUED: Final = 16  # in the queue; older ones are dropped
KNOWN_SHARE: Final = 0.75  # a text with at least this share known is not tokenized
# The budget of calls: INITIAL_BUDGET at first, one more each BUDGET_SECS and BUDGET_PER_USE more
# for each use of a result.
INITIAL_BUDGET: Final = 32
BUDGET_SECS: Final = 10.0
BUDGET_PER_USE: Final = 2
SILENT_SECS: Final = 60.0  # pause after an engine did not answer


class TokenizeRequest(NamedTuple):
    """`url`: of the worker that got the text. `key`: of the text, as in the prefix tree, for
    `length` bytes of text. `body`: for /tokenize."""

    url: str
    key: bytes
    length: int
    body: bytes


class TokenizedText:
    """`length` of the text in bytes, and its number of `tokens`."""

    __slots__ = ("_ids", "length", "tokens")

    def __init__(self, length: int, tokens: Sequence[int]) -> None:
        self.length = length
        self.tokens = len(tokens)
        self._ids = TokenIdText(encode_token_ids(tokens), len(tokens))

    def blocks(self, block_size: int, tokens: int) -> PromptBlocks:
        """The blocks of the first `tokens`."""
        return PromptBlocks(self._ids, block_size, tokens)


class FoundText(NamedTuple):
    """The first `tokens` of `known` are those of the first `shared` bytes of a text. `tokens` is
    estimated from bytes by the mean, so it may be slightly too high or too low."""

    known: TokenizedText
    shared: int
    tokens: int


class TokenizedTexts:
    """`now` is monotonic seconds."""

    def __init__(self) -> None:
        self.calls = self.failed = self.used = 0
        self._tree: PrefixTree[int] = PrefixTree(1 << 24)
        self._texts: dict[int, TokenizedText] = {}  # by number, the oldest first
        self._number = self._tokens = 0
        self._queue: deque[TokenizeRequest] = deque(maxlen=MAX_QUEUED)
        self._silent: dict[str, float] = {}
        self._budget = float(INITIAL_BUDGET)
        self._now: float | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, key: bytes, length: int) -> FoundText | None:
        """The known text that shares the longest prefix with a text of `length` bytes. Changes
        nothing."""
        depth, holders = self._tree.match(key)
        if not holders:
            return None
        shared = length if depth >= len(key) else text_length(depth)
        known = self._texts[self._tree.named(holders)[-1]]
        shared = min(shared, known.length)
        return FoundText(known, shared, known.tokens * shared // known.length)

    def should_tokenize(
        self, url: str, length: int, known_text: FoundText | None, now: float
    ) -> bool:
        """Whether the engine at `url` should tokenize a text of `length` bytes."""
        if self._budget < 1 or not MIN_BYTES <= length <= MAX_BYTES:
            return False
        if self._silent.get(url, now) > now:
            return False
        return known_text is None or known_text.shared < KNOWN_SHARE * length

    def enqueue(self, request: TokenizeRequest) -> None:
        self._budget -= 1
        self._queue.append(request)

    def next_request(self) -> TokenizeRequest | None:
        """The newest request: its blocks are most likely still cached for the next such text."""
        if not self._queue:
            return None
        self.calls += 1
        return self._queue.pop()

    def record_use(self) -> None:
        """A text was routed by the blocks of a known text."""
        self.used += 1
        self._budget = min(INITIAL_BUDGET, self._budget + BUDGET_PER_USE)

    def add(self, request: TokenizeRequest, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._number += 1
        self._texts[self._number] = TokenizedText(request.length, tokens)
        self._tokens += len(tokens)
        self._tree.insert(request.key, self._number)
        while len(self._texts) > MAX_TEXTS or self._tokens > MAX_TOKENS:
            oldest = next(iter(self._texts))
            self._tokens -= self._texts.pop(oldest).tokens
            self._tree.forget(oldest)

    def record_failure(self, request: TokenizeRequest, now: float) -> None:
        """The call failed."""
        self.failed += 1
        self._silent[request.url] = now + SILENT_SECS

    def maintain(self, now: float) -> None:
        before, self._now = self._now, now
        if before is not None:
            self._budget = min(INITIAL_BUDGET, self._budget + (now - before) / BUDGET_SECS)
        if len(self._silent) > MAX_TEXTS:
            self._silent = {url: until for url, until in self._silent.items() if until > now}
        self._tree.maintain(evict=False)

    def to_dict(self) -> dict[str, int]:
        """JSON-serializable."""
        count = len(self._texts)
        return {"texts": count, "calls": self.calls, "failed": self.failed, "used": self.used}
