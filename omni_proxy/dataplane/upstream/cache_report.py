"""What an answer says about the cache of the worker that gave it, handed to the policy that sent
the prompt there.

Contract: reads the last chunk that was kept, changes no byte, and never fails. Only a complete
answer of 2xx is read. Of a request in two legs the protocol says whose cache is meant: SGLang's
decode engine reports what prefill had cached, which comes over with the KV cache; vLLM's counts all
that was transferred, which says nothing, so with NIXL the prefill engine's own answer is read. A
decode worker that has computed the prompt itself reports its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_proxy.config.fields import Role
from omni_proxy.routing.cache_prediction import CachePrediction, note_first_byte
from omni_proxy.routing.inspect.response_usage import read_cached_tokens

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders, TwoLegs
    from omni_proxy.routing.inspect.requirements import Requirements


def settle_prediction(recorders: Recorders, exchange: Exchange, need: Requirements) -> None:
    """The exchange is over: learn from its answer, if it says anything."""
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
    """`answer`: its end, by the worker of this prediction; `sent_bytes`: of the request."""
    counts = read_cached_tokens(answer)
    if counts is None:
        prediction.reports.silent += 1
        return
    predicted = prediction.learner.learn(prediction, *counts, sent_bytes)
    if predicted is not None and recorders.meters is not None:
        recorders.meters.count_cached(prediction.worker.worker, predicted, counts[0])


def prediction_of_leg(leg: Exchange) -> CachePrediction | None:
    """That of the policy that picked the prefill worker."""
    need = leg.requirements
    return _prediction_for("prefill", need.prediction) if need is not None else None


def _of_reporting_worker(
    legs: TwoLegs, prediction: CachePrediction | None
) -> CachePrediction | None:
    if legs.prefill is None:
        return _prediction_for("decode", prediction)
    return _prediction_for("prefill", prediction) if legs.connector == "sglang" else None


def _prediction_for(role: Role, prediction: CachePrediction | None) -> CachePrediction | None:
    """That of the policy that picked a worker of this role."""
    while prediction is not None and prediction.worker.worker.role != role:
        prediction = prediction.former
    return prediction
