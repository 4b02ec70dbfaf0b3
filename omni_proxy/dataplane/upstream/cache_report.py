"""What an answer says about the cache of the worker that gave it, handed to the policy that sent
the prompt there.

Contract: reads the last chunk that was kept, changes no byte, and never fails. Only a complete
answer of 2xx is read. Of a request in two legs the decode worker's answer reports, by the protocol:
with SGLang what its prefill worker had cached, which comes over with the KV cache; else all that
was transferred, too, which says nothing of either worker. Where the decode worker has computed the
prompt itself, what that had cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cache_prediction import CachePrediction
from omni_proxy.routing.inspect.response_usage import read_cached_tokens

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders
    from omni_proxy.routing.inspect.requirements import Requirements


def note_first_byte(prediction: CachePrediction | None) -> None:
    """The response begins: the prompt is computed, by each worker that it was sent to."""
    while prediction is not None:
        prediction.note_first_byte()
        prediction = prediction.former


def settle_prediction(recorders: Recorders, exchange: Exchange, need: Requirements) -> None:
    """The exchange is over: learn from its answer, if it says anything."""
    prediction, need.prediction = need.prediction, None
    note_first_byte(prediction)
    if not exchange.last_chunk or exchange.outcome != "completed" or exchange.status // 100 != 2:
        return
    counts = read_cached_tokens(exchange.last_chunk)
    if counts is not None:
        learn_from(recorders, _of_reporting_worker(exchange, prediction), counts, exchange.bytes_in)


def learn_from(
    recorders: Recorders,
    prediction: CachePrediction | None,
    counts: tuple[int, int],
    sent_bytes: int,
) -> None:
    """`counts`: cached tokens and prompt tokens, by the worker of this prediction."""
    if prediction is None:
        return
    predicted = prediction.learner.learn(prediction, *counts, sent_bytes)
    if predicted is not None and recorders.meters is not None:
        recorders.meters.count_cached(prediction.worker.worker, predicted, counts[0])


def _of_reporting_worker(
    exchange: Exchange, prediction: CachePrediction | None
) -> CachePrediction | None:
    legs = exchange.legs
    if legs is None:
        return prediction
    if legs.prefill is None:
        return prediction_for("decode", prediction)
    return prediction_for("prefill", prediction) if legs.connector == "sglang" else None


def prediction_for(role: str, prediction: CachePrediction | None) -> CachePrediction | None:
    """That of the policy that picked a worker of this role."""
    while prediction is not None and role_of(prediction.worker) != role:
        prediction = prediction.former
    return prediction


def role_of(target: Worker) -> str:
    return target.worker.role
