"""Texts with tokens from an engine's /tokenize, and the queue of texts to tokenize.

    a text was sent -> question -> /tokenize of its worker -> tokens -> keys of its blocks

A later text with the same prefix starts with the same blocks. Invariants: the newest texts are
kept, in bounded memory; the number of questions is bounded by the use of earlier answers; an engine
that does not answer is not queried for a while. Pure: the requests are sent elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from omni_proxy.routing.inspect.prefix_text import LIMIT
from omni_proxy.routing.kv_events.block_keys import PromptBlocks, spell
from omni_proxy.routing.kv_events.token_id_text import SpelledIds
from omni_proxy.routing.prefix_tree import PrefixTree
from omni_proxy.routing.tree_key import text_length

# Length of texts to tokenize: at least about a thousand tokens, and not cut.
MIN_BYTES: Final = 4096
MAX_BYTES: Final = LIMIT - 2
MAX_TEXTS: Final = 256
MAX_TOKENS: Final = 1 << 20  # of all texts
MAX_QUESTIONS: Final = 16  # in the queue; older ones are dropped
ANSWERED_SHARE: Final = 0.75  # a text with at least this share known is not tokenized
# A budget of questions: FREE_QUESTIONS at first, one more each FREE_SECS and QUESTIONS_PER_USE more
# for each use of an answer.
FREE_QUESTIONS: Final = 32
FREE_SECS: Final = 10.0
QUESTIONS_PER_USE: Final = 2
SILENT_SECS: Final = 60.0  # pause after an engine did not answer


class TextQuestion(NamedTuple):
    """`url`: of the worker that got the text. `key`: of the text, as in the prefix tree, for
    `length` bytes of text. `body`: for /tokenize."""

    url: str
    key: bytes
    length: int
    body: bytes


class KnownText:
    """`length` of the text in bytes, and its number of `tokens`."""

    __slots__ = ("_ids", "length", "tokens")

    def __init__(self, length: int, tokens: Sequence[int]) -> None:
        self.length = length
        self.tokens = len(tokens)
        self._ids = SpelledIds(spell(tokens), len(tokens))

    def blocks(self, block_size: int, tokens: int) -> PromptBlocks:
        """The blocks of the first `tokens`."""
        return PromptBlocks(self._ids, block_size, tokens)


class FoundText(NamedTuple):
    """The first `tokens` of `known` are those of the first `shared` bytes of a text. `tokens` is
    estimated from bytes by the mean, so it may be slightly too high or too low."""

    known: KnownText
    shared: int
    tokens: int


class KnownTexts:
    """`now` is monotonic seconds."""

    def __init__(self) -> None:
        self.asked = self.failed = self.used = 0
        self._tree: PrefixTree[int] = PrefixTree(1 << 24)
        self._texts: dict[int, KnownText] = {}  # by number, the oldest first
        self._number = self._tokens = 0
        self._questions: deque[TextQuestion] = deque(maxlen=MAX_QUESTIONS)
        self._silent: dict[str, float] = {}
        self._free = float(FREE_QUESTIONS)
        self._now: float | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, key: bytes, length: int) -> FoundText | None:
        """The known text that shares the longest prefix with a text of `length` bytes. Changes
        nothing."""
        depth, held = self._tree.match(key)
        if not held:
            return None
        shared = length if depth >= len(key) else text_length(depth)
        known = self._texts[self._tree.named(held)[-1]]
        shared = min(shared, known.length)
        return FoundText(known, shared, known.tokens * shared // known.length)

    def is_worth_asking(self, url: str, length: int, found: FoundText | None, now: float) -> bool:
        """Whether the engine at `url` should tokenize a text of `length` bytes."""
        if self._free < 1 or not MIN_BYTES <= length <= MAX_BYTES:
            return False
        if self._silent.get(url, now) > now:
            return False
        return found is None or found.shared < ANSWERED_SHARE * length

    def ask(self, question: TextQuestion) -> None:
        self._free -= 1
        self._questions.append(question)

    def take_question(self) -> TextQuestion | None:
        """The newest question: its blocks are most likely still cached for the next such text."""
        if not self._questions:
            return None
        self.asked += 1
        return self._questions.pop()

    def note_use(self) -> None:
        """A text was routed by the blocks of a known text."""
        self.used += 1
        self._free = min(FREE_QUESTIONS, self._free + QUESTIONS_PER_USE)

    def learn(self, question: TextQuestion, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._number += 1
        self._texts[self._number] = KnownText(question.length, tokens)
        self._tokens += len(tokens)
        self._tree.insert(question.key, self._number)
        while len(self._texts) > MAX_TEXTS or self._tokens > MAX_TOKENS:
            oldest = next(iter(self._texts))
            self._tokens -= self._texts.pop(oldest).tokens
            self._tree.forget(oldest)

    def note_silence(self, question: TextQuestion, now: float) -> None:
        """The question was not answered."""
        self.failed += 1
        self._silent[question.url] = now + SILENT_SECS

    def maintain(self, now: float) -> None:
        before, self._now = self._now, now
        if before is not None:
            self._free = min(FREE_QUESTIONS, self._free + (now - before) / FREE_SECS)
        if len(self._silent) > MAX_TEXTS:
            self._silent = {url: until for url, until in self._silent.items() if until > now}
        self._tree.maintain(evict=False)

    def as_facts(self) -> dict[str, int]:
        """JSON-serializable."""
        count = len(self._texts)
        return {"texts": count, "calls": self.asked, "failed": self.failed, "used": self.used}
