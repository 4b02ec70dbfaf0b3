"""Output that matches a JSON schema: the tokens that may follow, by llguidance.

Invariant: a schema feature that the library cannot enforce is refused by name, never ignored.
Whitespace is bounded; otherwise a small model could write blank lines until its token limit.
Schemas are compiled in a thread and never delay other requests; a request that was dropped during
the compilation is not restored.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from omni_proxy.replica.models.tokenizer import Tokenizer
from omni_proxy.replica.text.prompt import Prompt
from omni_proxy.replica.text.sampling import SamplingError

if TYPE_CHECKING:
    from torch import Tensor


ANY_OBJECT = '{"type": "object"}'
# Larger schemas take long to compile; OpenAI allows 5,000 properties of 120,000 characters.
MAX_SCHEMA_BYTES = 128 * 1024
MAX_COMPILED = 16
MAX_ERROR_CHARS = 300  # of the library's message
# Between two parts of a JSON text: nothing, a blank, or a new line with its indentation.
WHITESPACE = r"[ ]?|\n[ ]{0,12}"
MISSING = (
    "JSON schemas need the package llguidance, which is not installed: pip install "
    "'omni-proxy[replica]'"
)
# Options that a schema could set itself, under "x-guidance", and that change what is enforced.
OPTIONS = {
    "whitespace_pattern": WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


class ConstraintError(SamplingError):
    """The schema cannot be enforced; the message names the unsupported part."""


class MissingLibraryError(Exception):
    """This installation cannot enforce schemas; the message names the package to install."""


def check_schema(schema: str) -> None:
    """Raises ConstraintError for a schema that cannot be enforced, or MissingLibraryError.

    May be slow: do not call it on an event loop.
    """
    library = _library()
    grammar = _grammar(library, schema)
    is_invalid, messages = library.LLMatcher.validate_grammar_with_warnings(
        grammar, limits=_limits(library)
    )
    if is_invalid:
        raise ConstraintError(_single_line("; ".join(messages)))


class ConstraintFactory:
    """Makes the constraints for one model. Any thread may call it.

    The latest schemas are kept compiled: `n` choices, and repeated requests, need only a copy.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._trie: Any = None
        self._compiled: dict[str, Any] = {}  # the newest last

    def constraint(self, schema: str) -> Constraint:
        """Return a new constraint. Raises what `check_schema` raises; the first call is slower."""
        with self._lock:
            matcher = self._compiled.pop(schema, None) or self._compile(schema)
            constraint = Constraint(matcher.deep_copy(), self._tokenizer.vocab_size)
            self._compiled[schema] = matcher
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        return constraint

    def _compile(self, schema: str) -> Any:
        library = _library()
        if self._trie is None:
            self._trie = _trie(library, self._tokenizer)
        grammar = _grammar(library, schema)
        return library.LLMatcher(self._trie, grammar, log_level=0, limits=_limits(library))


class Constraint:
    """The position of one response in its schema. Not thread-safe."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        import numpy as np

        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary + 31) // 32, dtype=np.int32)
        self._raise_error()

    @property
    def complete(self) -> bool:
        """Whether the response matches the schema and nothing can be added to it."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Tensor:
        """Mask of the tokens that may follow: bool [vocabulary]. Raises ConstraintError."""
        import numpy as np
        import torch

        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._raise_error()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocabulary]
        return torch.from_numpy(bits.view(np.bool_))

    def accept(self, token: int) -> None:
        """Advance by `token`, one of those allowed. Raises ConstraintError."""
        self._matcher.consume_token(token)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            message = _single_line(self._matcher.get_error())
            raise ConstraintError(f"response_format: the schema cannot be enforced: {message}")


class _TokenizerAdapter:
    """The tokenizer's interface for llguidance; control tokens have a name instead of text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        names = {token_id: tokenizer.control_name(token_id) for token_id in ids}
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.special_token_ids = [token_id for token_id in ids if names[token_id] is not None]
        self.tokens = [
            (names[token_id] or "").encode() or tokenizer.token_bytes(token_id) for token_id in ids
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"))


def _single_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR_CHARS]


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
        raise ConstraintError(f"it has {size} bytes; the limit is {MAX_SCHEMA_BYTES}")
    try:
        grammar: str = library.LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    except ValueError as error:
        raise ConstraintError(str(error)) from error
    return grammar


class CompiledConstraint(Struct, frozen=True):
    """A message in the stage's own queue: a constraint is compiled, or failed."""

    prompt: Any
    result: Any  # Constraint | Exception


class ConstraintCompiler:
    """Compiles constraints in at most one thread, which ends when there is no more work.

    All methods are called in the scheduler's thread.
    """

    def __init__(self, stage: str, constraints: ConstraintFactory) -> None:
        self._stage = stage
        self._constraints = constraints
        self._lock = threading.Lock()  # over _queue and _working
        self._queue: deque[tuple[Prompt, Callable[[CompiledConstraint], None]]] = deque()
        self._working = False
        self._waiting: dict[str, Prompt] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def ids(self) -> list[str]:
        return list(self._waiting)

    @property
    def prompts(self) -> list[Prompt]:
        return list(self._waiting.values())

    def begin(self, prompt: Prompt, post: Callable[[CompiledConstraint], None]) -> None:
        """Compile the prompt's constraint; `post` is called with it in another thread."""
        self._waiting[prompt.request_id] = prompt
        with self._lock:
            self._queue.append((prompt, post))
            if self._working:
                return
            self._working = True
        name = f"{self._stage}-constraints"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def take(self, done: CompiledConstraint) -> Constraint | Exception | None:
        """Return the constraint or its error; None if the request was dropped."""
        # A new request may have the id of an aborted one: compare the prompts themselves.
        request_id = done.prompt.request_id
        if request_id not in self._waiting or self._waiting[request_id] is not done.prompt:
            return None
        del self._waiting[request_id]
        result: Constraint | Exception = done.result
        return result

    def forget(self, request_id: str) -> int:
        """Drop a request; return how many there were: 0 or 1."""
        return int(self._waiting.pop(request_id, None) is not None)

    def clear(self) -> None:
        self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._working = False
                    return
                prompt, post = self._queue.popleft()
            result: Constraint | Exception
            try:
                result = self._constraints.constraint(prompt.sampling.json_schema)
            except Exception as error:  # the scheduler fails the request with it
                result = error
            post(CompiledConstraint(prompt, result))
