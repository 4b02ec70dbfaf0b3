"""A Hypothesis strategy that chooses one of several, some more often.

`one_of(*[a] * 4, b)` does not: it drops a strategy that it was given before.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """A value of one strategy; `choices`: each with its weight, the simplest first."""
    return st.sampled_from([each for weight, each in choices for _ in range(weight)]).flatmap(
        lambda chosen: chosen
    )
