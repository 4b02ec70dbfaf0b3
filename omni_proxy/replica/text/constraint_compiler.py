"""Compiles constraints in a thread; their requests wait until it is done.

Invariant: a schema never delays other requests. A request that was aborted or dropped meanwhile
does not come back when its constraint is ready.
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
    """A message in the stage's own queue: a constraint is compiled, or failed."""

    prompt: Any
    result: Any  # Constraint | Exception


class ConstraintCompiler:
    """At most one thread, alive while there is work; all methods are called in the scheduler's
    thread.
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
