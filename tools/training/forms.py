"""The forms in which tensors are sent to a group.

`two-phase`: one prepare for all buckets, all broadcasts, one complete. `buckets`: the three steps
for each bucket. `single`: one call per bucket, in progress while its bytes are sent. Only a sync's
last call has its version and its flush. Source: note:two-phase 1.3 to 1.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.training.buckets import Bucket
from tools.training.endpoint import Answer, Endpoint
from tools.training.faults import Fault, Moment
from tools.training.group import Group, SyncFailed

TRANSPORT = "nccl_broadcast"


@dataclass(frozen=True, slots=True)
class Sending:
    """The parts of a sync that every form uses: endpoint, group, and common message fields."""

    endpoint: Endpoint
    group: Group
    version: str
    load_format: str | None
    fault: Fault

    def message(self, more: dict[str, Any], *, named: bool = True) -> dict[str, Any]:
        body = {"group_name": self.group.settings.group_name, **more}
        return body | ({"load_format": self.load_format} if self.load_format and named else {})

    def broadcast(self, bucket: Bucket, *, first: bool = True, last: bool = True) -> None:
        """Broadcast a bucket; `first` and `last` of the buckets that are prepared together."""
        messages = bucket.messages(self.load_format)
        if first:
            self.fault.before()
        for number, message in enumerate(messages):
            moment = Moment(number, len(messages), self._begin)
            for part in self.fault.sent(message, moment):
                self.group.broadcast(part)
        if last:
            self.fault.after()

    def _begin(self, message: Any) -> None:
        self.group.broadcast(message, wait=False)


def two_phase(sending: Sending, buckets: Sequence[Bucket]) -> None:
    announced = [each.to_dict() for each in sending.fault.announced(buckets)]
    body = sending.message({"num_buckets": len(announced), "buckets": announced})
    call_or_raise(sending.endpoint, "/prepare_weights_update", body)
    for number, bucket in enumerate(buckets):
        first, last = number == 0, number == len(buckets) - 1
        sending.broadcast(bucket, first=first, last=last)
    body = sending.message({"flush_cache": True, "weight_version": sending.version})
    answer = call_or_raise(sending.endpoint, "/complete_weights_update", body)
    if answer.body.get("num_buckets_received", len(buckets)) != len(buckets):
        raise SyncFailed(
            f"{answer.body['num_buckets_received']} of {len(buckets)} buckets were received"
        )


def bucket_by_bucket(sending: Sending, buckets: Sequence[Bucket]) -> None:
    announced = sending.fault.announced(buckets)
    for number, (bucket, described) in enumerate(zip(buckets, announced, strict=True), start=1):
        body = sending.message(described.to_dict() | {"transport": TRANSPORT})
        call_or_raise(sending.endpoint, "/prepare_weights_update", body)
        sending.broadcast(bucket)
        body = {
            "transport": TRANSPORT,
            "run_post_process_weights": False,
            **_final_fields(sending, last=number == len(buckets)),
        }
        call_or_raise(sending.endpoint, "/complete_weights_update", sending.message(body))


def single_phase(sending: Sending, buckets: Sequence[Bucket]) -> None:
    announced = sending.fault.announced(buckets)
    for number, (bucket, described) in enumerate(zip(buckets, announced, strict=True), start=1):
        last = number == len(buckets)
        body = sending.message(described.to_dict() | _final_fields(sending, last=last))
        call = sending.endpoint.begin("/update_weights_from_distributed", body)
        try:
            sending.broadcast(bucket)
        except SyncFailed as error:
            # There is no earlier answer in this form: a refusal, which is the cause, arrives now.
            raise SyncFailed(call.wait() or str(error)) from error
        require_ok(call.answer())


FORMS: dict[str, Callable[[Sending, Sequence[Bucket]], None]] = {
    "two-phase": two_phase,
    "buckets": bucket_by_bucket,
    "single": single_phase,
}


def call_or_raise(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Answer:
    """Call and wait; raises SyncFailed if the call failed."""
    return require_ok(endpoint.call(path, body))


def require_ok(answer: Answer) -> Answer:
    if not answer.ok:
        raise SyncFailed(f"{answer.path} answered {answer.status}: {answer.why}")
    return answer


def _final_fields(sending: Sending, *, last: bool) -> dict[str, Any]:
    return {"flush_cache": last, "weight_version": sending.version if last else None}
