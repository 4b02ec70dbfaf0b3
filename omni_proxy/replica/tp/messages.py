"""What the leader and its followers say to each other, beside what every stage hears and says.

To a follower go the stage's own messages alone: what is for its rank only is an `Admin` of an
action that no route has.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from omni_proxy.replica.pipeline.messages import Admin, StageOutput

STEP = "tp_step"
VERDICT = "tp_verdict"
GIVE_UP = "tp_give_up"


class Vote(Struct, frozen=True, tag="vote"):
    """A follower is done with the slow step `number` of an operation; `fault` "" is well.

    `damaged`: the step left weights of two kinds behind."""

    op_id: str
    number: int
    fault: str
    damaged: bool = False


FollowerMessage: TypeAlias = StageOutput | Vote


class RankMessage(Struct, frozen=True):
    """What a follower said, in the leader's inbox."""

    rank: int
    message: FollowerMessage


class StepOverdue(Struct, frozen=True):
    """The leader has waited for its followers' part of an operation for long enough."""

    op_id: str
    number: int


def step(entries: list[Any], parts: list[tuple[int, list[int]]]) -> Admin:
    """The next batch: what became of KVs before, then (number of the KV, its new tokens)."""
    return Admin("", STEP, {"kv": entries, "parts": parts})


def verdict(op_id: str, number: int, fault: str) -> Admin:
    """How the slow step `number` went at all ranks: "" lets the operation go on."""
    return Admin(op_id, VERDICT, {"number": number, "fault": fault})


def give_up(op_id: str, number: int, fault: str) -> Admin:
    """Who is still in the slow step `number` need not wait for its end: another rank has failed."""
    return Admin(op_id, GIVE_UP, {"number": number, "fault": fault})
