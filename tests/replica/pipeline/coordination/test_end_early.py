"""Which requests are told to end early, by whom, and which can only be aborted."""

from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator
from omni_proxy.replica.pipeline.messages import (
    Abort,
    EndEarly,
    OmniRequest,
    Result,
    StageEnded,
    StageReady,
)
from omni_proxy.replica.pipeline.requests import RequestAborted
from tests.replica.pipeline.coordination.test_coordinator import REQUEST, Board, config

TEXT = OmniRequest("hi", {}, {"output_modalities": ["text"]})


def everyone(request_id):
    return True


def made(request=TEXT):
    """A coordinator whose stage d ends requests early, with one request at stage a."""
    board = Board()
    coordinator = Coordinator(compile_plan(config()), board)
    coordinator.receive(StageReady("d", {"ends_early": True}))
    return coordinator, board, coordinator.open("r", request)


def told(board):
    return [(name, message) for name, message in board.sent if isinstance(message, EndEarly)]


async def test_the_stage_that_generates_is_reported_and_its_result_ends_the_request():
    coordinator, board, delivery = made()
    coordinator.receive(Result("r", "a", {}))
    assert coordinator.end_early(everyone) == ["r"]
    assert told(board) == [("d", EndEarly("r"))]
    assert coordinator.live_count == 1
    coordinator.receive(Result("r", "d", {"text": "x", "finish_reason": "abort"}))
    assert delivery.end.results["d"]["finish_reason"] == "abort"
    assert coordinator.end_early(everyone) == []


async def test_a_request_before_that_stage_is_ended_as_soon_as_it_gets_there():
    coordinator, board, _ = made()
    assert coordinator.end_early(everyone) == ["r"]
    assert told(board) == []
    coordinator.receive(Result("r", "a", {}))
    kinds = [type(message).__name__ for name, message in board.sent if name == "d"]
    assert kinds == ["Submit", "EndEarly"]


async def test_a_request_at_a_stage_that_cannot_is_aborted_everywhere():
    coordinator, board, delivery = made(REQUEST)
    coordinator.receive(Result("r", "a", {}))  # d, and s that d streams into
    assert coordinator.end_early(everyone) == ["r"]
    assert told(board) == []
    assert set(board.kinds(Abort)) == {"a", "d", "s"}
    assert isinstance(delivery.end, RequestAborted)


async def test_only_those_that_are_wanted_are_ended():
    coordinator, board, _ = made()
    coordinator.open("other", TEXT)
    assert coordinator.end_early(lambda request_id: request_id == "other") == ["other"]
    assert coordinator.end_early(lambda request_id: request_id == "x") == []
    coordinator.receive(Result("r", "a", {}))
    coordinator.receive(Result("other", "a", {}))
    assert told(board) == [("d", EndEarly("other"))]


async def test_a_stage_that_has_ended_fails_the_request_all_the_same():
    coordinator, board, delivery = made()
    coordinator.end_early(everyone)
    coordinator.receive(StageEnded("d", "it crashed"))
    coordinator.receive(Result("r", "a", {}))
    assert delivery.end.status == 503
    assert told(board) == []
