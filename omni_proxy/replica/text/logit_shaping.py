"""Choices that more than the model decides: biases, penalties for what was said, a JSON schema.

Invariant: a request that asks for none of these is served by the plain `TokenSampler`, at its price. The
constraint has the last word: no bias and no penalty brings back a token that it forbids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from omni_proxy.replica.text.sampling import Sampling, TokenSampler

if TYPE_CHECKING:
    from torch import Tensor

    from omni_proxy.replica.text.constraint import Constraint


def make_sampler(sampling: Sampling, constraint: Constraint | None) -> TokenSampler:
    """The chooser of one request; `constraint` is that of its schema, where it has one."""
    if sampling.shaped:
        return ShapedTokenSampler(sampling, constraint)
    return TokenSampler(sampling)


class ShapedTokenSampler(TokenSampler):
    """Counts what it has chosen, for the penalties; the prompt's tokens are not counted."""

    __slots__ = ("_biased", "_biases", "_constraint", "_counts")

    def __init__(self, sampling: Sampling, constraint: Constraint | None) -> None:
        import torch

        super().__init__(sampling)
        self._constraint = constraint
        self._counts: dict[int, int] = {}
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()))

    @property
    def complete(self) -> bool:  # type: ignore[override]  # a constant in the plain chooser
        return self._constraint is not None and self._constraint.complete

    def choose(self, logits: Tensor, tokens: Iterable[int]) -> tuple[int, float | None]:
        """As the plain one. Raises ConstraintError where the constraint cannot go on."""
        token, logprob = super().choose(logits, tokens)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.accept(token)
        return token, logprob

    def _shaped(self, logits: Tensor, tokens: Iterable[int]) -> Tensor:
        logits = super()._shaped(logits, tokens).clone()
        self._penalise(logits)
        # Ids are counted from 0 in each request: none stands twice, so that plain adding is right.
        logits[self._biased] += self._biases
        if self._constraint is not None:
            logits[~self._constraint.allowed()] = float("-inf")
        return logits

    def _penalise(self, logits: Tensor) -> None:
        """Make what was said less likely: by a step for each token, by another for each time."""
        import torch

        wanted = self._sampling
        if not self._counts or not (wanted.presence_penalty or wanted.frequency_penalty):
            return
        said = torch.tensor(list(self._counts), dtype=torch.long)
        times = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
        logits[said] -= wanted.presence_penalty + wanted.frequency_penalty * times
