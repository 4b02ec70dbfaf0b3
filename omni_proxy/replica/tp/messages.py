"""Messages between the leader and its followers, in addition to those of every stage.

A follower receives only ordinary stage messages: those for tensor parallelism are `Admin` messages
with actions that no route has.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from omni_proxy.replica.pipeline.messages import Admin, StageOutput

STEP = "tp_step"
VERDICT = "tp_verdict"
GIVE_UP = "tp_give_up"


class Vote(Struct, frozen=True, tag="vote"):
    """A follower has done the slow step `number` of an operation; `fault` "" means success.

    `damaged`: the step left a mix of old and new weights."""

    op_id: str
    number: int
    fault: str
    damaged: bool = False


FollowerMessage: TypeAlias = StageOutput | Vote


class RankMessage(Struct, frozen=True):
    """A follower's message, in the leader's inbox."""

    rank: int
    message: FollowerMessage


class StepOverdue(Struct, frozen=True):
    """The followers' part of an operation has exceeded its deadline."""

    op_id: str
    number: int


def step(entries: list[Any], parts: list[tuple[int, list[int]]]) -> Admin:
    """The next batch: journal entries first, then (KV number, its new tokens)."""
    return Admin("", STEP, {"kv": entries, "parts": parts})


def verdict(op_id: str, number: int, fault: str) -> Admin:
    """The result of the slow step `number` at all ranks; "" lets the operation continue."""
    return Admin(op_id, VERDICT, {"number": number, "fault": fault})


def give_up(op_id: str, number: int, fault: str) -> Admin:
    """Aborts the slow step `number` at ranks still in it, because another rank has failed."""
    return Admin(op_id, GIVE_UP, {"number": number, "fault": fault})
