"""Reads workers' reports from responses: the engine's load from the head, and the number of cached
tokens from the body, for the policy that picked the worker.

Contract: no byte of a body is changed, and no function raises. The proxy requests the load
(`UpstreamPool.asks_for_load`), but not from workers with data-parallel ranks; the client gets the
field only if it requested it, as the engine wrote it (note:real-engines 5.3). The cache report is
in the last chunk of a complete 2xx. In two legs SGLang's decode engine reports the prefill engine's
cache; with NIXL the prefill response is read. A decode worker that computed the prompt itself
reports its own cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_proxy.config.fields import Role
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.cache_prediction import CachePrediction, note_first_byte
from omni_proxy.routing.inspect.response_usage import read_cached_tokens
from omni_proxy.wire.header_fields import LOAD_HINT
from omni_proxy.wire.load_report import (
    LOAD_FORMAT_LINE,
    NO_REPORT,
    EngineLoad,
    find_load_field,
    load_of_header,
    split_load_field,
)
from omni_proxy.wire.request import RequestHead

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders, TwoLegs
    from omni_proxy.routing.inspect.requirements import Requirements


def own_lines_of(pool: UpstreamPool, head: RequestHead) -> bytes:
    """The pool's lines of a request, without the load field if the client has sent its own."""
    if pool.asks_for_load and LOAD_HINT in head.hints:
        return pool.own_lines.replace(LOAD_FORMAT_LINE, b"")
    return pool.own_lines


def take_load(fleet: Fleet, pool: UpstreamPool, top: bytes) -> bytes:
    """Report the load field of a response, if it has vLLM's spelling. Returns the head without
    it."""
    rest, value = split_load_field(top)
    if value:
        _report(fleet, pool, value)
    return rest


def read_load(fleet: Fleet, pool: UpstreamPool, top: bytes, head: RequestHead) -> bytes:
    """As `take_load`, with any spelling; the field stays if the client requested it. `head`: of the
    request."""
    rest, value = find_load_field(top)
    if value:
        _report(fleet, pool, value)
    return top if LOAD_HINT in head.hints else rest


def _report(fleet: Fleet, pool: UpstreamPool, value: bytes) -> None:
    report = load_of_header(value)
    worker = pool.worker
    if report != NO_REPORT and worker is not None and not worker.dp_ranks:
        fleet.loads.report(worker, EngineLoad(report, pool.loop.now))


def settle_prediction(recorders: Recorders, exchange: Exchange, need: Requirements) -> None:
    """At the end of the exchange: learn from the cache report of its response, if it has one."""
    prediction, need.prediction = need.prediction, None
    if prediction is None:
        return
    if not prediction.answered or prediction.former is not None:
        note_first_byte(prediction)
    answer = exchange.last_chunk
    if not answer or exchange.outcome != "completed" or not 200 <= exchange.status < 300:
        return
    if exchange.legs is not None:
        prediction = _of_reporting_worker(exchange.legs, prediction)
        if prediction is None:
            return
    learn_from(recorders, prediction, answer, exchange.bytes_in)


def learn_from(
    recorders: Recorders, prediction: CachePrediction, answer: bytes, sent_bytes: int
) -> None:
    """`answer`: the last chunk of the response of the prediction's worker. `sent_bytes`: size of
    the request body."""
    counts = read_cached_tokens(answer)
    if counts is None:
        prediction.reports.note_silence()
        return
    predicted = prediction.learner.learn(prediction, *counts, sent_bytes)
    if predicted is not None and recorders.meters is not None:
        recorders.meters.count_cached(prediction.worker.worker, predicted, counts[0])


def prediction_of_leg(leg: Exchange) -> CachePrediction | None:
    """The prediction of the policy that picked the prefill worker."""
    need = leg.requirements
    return _prediction_for("prefill", need.prediction) if need is not None else None


def _of_reporting_worker(
    legs: TwoLegs, prediction: CachePrediction | None
) -> CachePrediction | None:
    if legs.prefill is None:
        return _prediction_for("decode", prediction)
    return _prediction_for("prefill", prediction) if legs.connector == "sglang" else None


def _prediction_for(role: Role, prediction: CachePrediction | None) -> CachePrediction | None:
    """The prediction of the policy that picked a worker of this role."""
    while prediction is not None and prediction.worker.worker.role != role:
        prediction = prediction.former
    return prediction
