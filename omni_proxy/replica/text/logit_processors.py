"""Logit processors of one request: biases, penalties, and the constraint of a JSON schema.

Invariant: a request without any of these uses the plain `TokenSampler`. The constraint is applied
last: no bias and no penalty can select a token that it forbids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from omni_proxy.replica.text.json_schema import Constraint
from omni_proxy.replica.text.sampling import Sampling, TokenSampler

if TYPE_CHECKING:
    from torch import Tensor


def make_sampler(sampling: Sampling, constraint: Constraint | None) -> TokenSampler:
    """Return the sampler of one request; `constraint` is that of its schema, if it has one."""
    if sampling.shaped:
        return ShapedTokenSampler(sampling, constraint)
    return TokenSampler(sampling)


class ShapedTokenSampler(TokenSampler):
    """Counts the tokens it has chosen, for the penalties; tokens of the prompt are not counted."""

    __slots__ = ("_biased", "_biases", "_constraint", "_counts")

    def __init__(self, sampling: Sampling, constraint: Constraint | None) -> None:
        import torch

        super().__init__(sampling)
        self._constraint = constraint
        self._counts: dict[int, int] = {}
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()))

    @property
    def complete(self) -> bool:  # type: ignore[override]  # a constant in the plain sampler
        return self._constraint is not None and self._constraint.complete

    def choose(self, logits: Tensor, tokens: Iterable[int]) -> tuple[int, float | None]:
        """As in TokenSampler. Raises ConstraintError if no token is allowed."""
        token, logprob = super().choose(logits, tokens)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.accept(token)
        return token, logprob

    def _shaped(self, logits: Tensor, tokens: Iterable[int]) -> Tensor:
        logits = super()._shaped(logits, tokens).clone()
        self._penalise(logits)
        # The ids are keys of a dict, so none occurs twice and indexed addition is correct.
        logits[self._biased] += self._biases
        if self._constraint is not None:
            logits[~self._constraint.allowed()] = float("-inf")
        return logits

    def _penalise(self, logits: Tensor) -> None:
        """Presence penalty once per token, frequency penalty per occurrence."""
        import torch

        sampling = self._sampling
        if not self._counts or not (sampling.presence_penalty or sampling.frequency_penalty):
            return
        seen = torch.tensor(list(self._counts), dtype=torch.long)
        counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
        logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
