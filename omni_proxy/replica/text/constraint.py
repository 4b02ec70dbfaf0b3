"""Answers that must fit a JSON schema: which tokens may come next (llguidance).

Invariant: the library is imported where the first schema comes, never before. What a schema asks
for and the library cannot enforce is refused by name; nothing is left unenforced in silence.
Whitespace is bounded, or a small model would write blank lines until its tokens run out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from omni_proxy.replica.models.tokenizer import Tokenizer
from omni_proxy.replica.text.sampling import SamplingError

if TYPE_CHECKING:
    from torch import Tensor

ANY_OBJECT = '{"type": "object"}'
# A larger one takes the library most of a second; OpenAI takes 5,000 properties of 120,000 letters.
MAX_SCHEMA_BYTES = 128 * 1024
MAX_COMPILED = 16
MAX_ERROR_CHARS = 300  # letters of what the library says
# Between two parts of a JSON text: nothing, a blank, or a new line with its indentation.
WHITESPACE = r"[ ]?|\n[ ]{0,12}"
MISSING = (
    "JSON schemas need the package llguidance, which is not installed: pip install "
    "'omni-proxy[replica]'"
)
# All that a schema could choose itself, under "x-guidance", and that changes what is enforced.
OPTIONS = {
    "whitespace_pattern": WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


class ConstraintError(SamplingError):
    """The schema cannot be enforced; the text says what in it."""


class MissingLibraryError(Exception):
    """This installation enforces no schema; the text says what to install."""


def check_schema(schema: str) -> None:
    """Raises ConstraintError for a schema that cannot be enforced, MissingLibraryError.

    It may take half a second: not for an event loop's thread.
    """
    library = _library()
    grammar = _grammar(library, schema)
    wrong, messages = library.LLMatcher.validate_grammar_with_warnings(
        grammar, limits=_limits(library)
    )
    if wrong:
        raise ConstraintError(_in_a_line("; ".join(messages)))


class ConstraintFactory:
    """What makes the constraints of one model's answers. Any thread may call it.

    The last schemas are kept compiled: `n` answers, and a client that asks again, need a copy.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._trie: Any = None
        self._compiled: dict[str, Any] = {}  # the newest last

    def constraint(self, schema: str) -> Constraint:
        """A fresh one. Raises as `check_schema`; the first call takes longer than the others."""
        with self._lock:
            matcher = self._compiled.pop(schema, None) or self._compile(schema)
            one = Constraint(matcher.deep_copy(), self._tokenizer.vocab_size)
            self._compiled[schema] = matcher
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        return one

    def _compile(self, schema: str) -> Any:
        library = _library()
        if self._trie is None:
            self._trie = _trie(library, self._tokenizer)
        grammar = _grammar(library, schema)
        return library.LLMatcher(self._trie, grammar, log_level=0, limits=_limits(library))


class Constraint:
    """Where one answer stands in its schema. One thread at a time."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        import numpy as np

        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary + 31) // 32, dtype=np.int32)
        self._raise_fault()

    @property
    def complete(self) -> bool:
        """The answer fits the schema and nothing can be added to it."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Tensor:
        """Which tokens may come next: [vocabulary] of bool. Raises ConstraintError."""
        import numpy as np
        import torch

        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._raise_fault()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocabulary]
        return torch.from_numpy(bits.view(np.bool_))

    def accept(self, token: int) -> None:
        """Go on behind `token`, one of those allowed. Raises ConstraintError."""
        self._matcher.consume_token(token)
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._matcher.is_error():
            told = _in_a_line(self._matcher.get_error())
            raise ConstraintError(f"response_format: the schema cannot be enforced: {told}")


class _TokenizerAdapter:
    """A tokenizer as the library reads it; a control token has its name, which is no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        names = {each: tokenizer.control_name(each) for each in ids}
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.special_token_ids = [each for each in ids if names[each] is not None]
        self.tokens = [(names[each] or "").encode() or tokenizer.token_bytes(each) for each in ids]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"))


def _in_a_line(told: str) -> str:
    return " ".join(told.split())[:MAX_ERROR_CHARS]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingLibraryError(MISSING) from error
    return llguidance


def _trie(library: Any, tokenizer: Tokenizer) -> Any:
    spelling = library.TokenizerWrapper(_TokenizerAdapter(tokenizer))
    return library.LLTokenizer(
        spelling, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_ids)
    )


def _limits(library: Any) -> Any:
    return library.LLParserLimits(verbose_errors=False)


def _grammar(library: Any, schema: str) -> str:
    size = len(schema.encode("utf-8", errors="replace"))
    if size > MAX_SCHEMA_BYTES:
        raise ConstraintError(f"it has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    try:
        grammar: str = library.LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    except ValueError as error:
        raise ConstraintError(str(error)) from error
    return grammar
