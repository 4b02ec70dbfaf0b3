"""Requests whose constraint is still being made, in a thread of their own.

Invariant: a schema never holds up the answers that are computed meanwhile. What was forgotten, by
an abort or a dropped queue, does not come back when its constraint is ready.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from omni_proxy.replica.text.constraint import Constraint, ConstraintFactory
from omni_proxy.replica.text.prompt import Prompt


class CompiledConstraint(Struct, frozen=True):
    """In the stage's own queue: a constraint is ready, or could not be made."""

    prompt: Any
    made: Any  # Constraint | Exception


class ConstraintCompiler:
    """One thread at most, which lives while there is work; all else is the scheduler's thread."""

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

    def begin(self, prompt: Prompt, post: Callable[[CompiledConstraint], None]) -> None:
        """Have the prompt's constraint made; `post` is called with it in another thread."""
        self._waiting[prompt.request_id] = prompt
        with self._lock:
            self._queue.append((prompt, post))
            if self._working:
                return
            self._working = True
        name = f"{self._stage}-constraints"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def take(self, done: CompiledConstraint) -> Constraint | Exception | None:
        """What became of it; None where nobody wants it any more."""
        # A new request may have the id of one that was aborted: it is another prompt.
        request_id = done.prompt.request_id
        if request_id not in self._waiting or self._waiting[request_id] is not done.prompt:
            return None
        del self._waiting[request_id]
        made: Constraint | Exception = done.made
        return made

    def forget(self, request_id: str) -> int:
        """Return how many there were: 0 or 1."""
        return int(self._waiting.pop(request_id, None) is not None)

    def clear(self) -> None:
        self._waiting.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._working = False
                    return
                prompt, post = self._queue.popleft()
            made: Constraint | Exception
            try:
                made = self._constraints.constraint(prompt.sampling.json_schema)
            except Exception as error:  # it is told where the request is
                made = error
            post(CompiledConstraint(prompt, made))
