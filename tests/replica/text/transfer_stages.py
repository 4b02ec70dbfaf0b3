"""Prefill and decode stages of the tiny model, in threads of this process, over loopback."""

import time
from itertools import count

from omni_proxy.replica.kv_transfer.request_fields import (
    PARAMS,
    Fetch,
    Serve,
    TransferFields,
    room_key,
    to_params,
)
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    Admin,
    AdminResult,
    EndEarly,
    Result,
    ResultChunk,
    StageFailure,
)
from omni_proxy.replica.stages.text import build
from tests.replica.text.scheduler_harness import Loop, long_prompt, submission

NUMBERS = count(1)
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "logprobs": True, "top_logprobs": 2}


def stage(role="null", *, seed=0, cache=0, **settings) -> "Stage":
    transfer = {"role": role, "port": 0, "wait_secs": 20.0, **settings} if role != "null" else {}
    return Stage(
        build("decode", seed=seed, threads=1, prefix_cache_entries=cache, kv_transfer=transfer)
    )


class Stage(Loop):
    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.scheduler = scheduler
        self.skipped = []
        self.address = scheduler.info.get("kv_transfer", {"host": "", "port": 0})

    def next(self, kind, holds=lambda message: True):
        """The next message of `kind` for which `holds` is true. Keeps skipped ones for later."""
        for message in self.skipped:
            if isinstance(message, kind) and holds(message):
                self.skipped.remove(message)
                return message
        while True:
            message = self.outbox.get(timeout=60)
            if isinstance(message, kind) and holds(message):
                return message
            if isinstance(message, Result | ResultChunk | StageFailure):
                self.skipped.append(message)

    def submit(self, prompt, spec=None, request_id=None, **params) -> str:
        request_id = request_id or f"request-{next(NUMBERS)}"
        params = {"max_new_tokens": 4} | params
        if spec is not None:
            params["kv_transfer"] = to_params(spec)
        self.inbox.put(submission(request_id, prompt, **params))
        return request_id

    def end(self, request_id) -> Result | StageFailure:
        kinds = (Result, StageFailure)
        return self.next(kinds, lambda message: message.request_id == request_id)

    def ask(self, prompt, spec=None, **params) -> dict:
        outcome = self.end(self.submit(prompt, spec, **params))
        assert isinstance(outcome, Result), outcome
        return outcome.data

    def fail(self, prompt, spec=None, **params) -> StageFailure:
        outcome = self.end(self.submit(prompt, spec, **params))
        assert isinstance(outcome, StageFailure), outcome
        return outcome

    def streamed(self, request_id) -> list[dict]:
        """The chunks of the request and its result."""
        is_of_request = lambda message: message.request_id == request_id  # noqa: E731
        messages = [self.next((ResultChunk, Result), is_of_request)]
        while isinstance(messages[-1], ResultChunk):
            messages.append(self.next((ResultChunk, Result, StageFailure), is_of_request))
        return [each.chunk if isinstance(each, ResultChunk) else each.data for each in messages]

    def abort(self, request_id):
        self.inbox.put(Abort(request_id))

    def end_early(self, request_id):
        self.inbox.put(EndEarly(request_id))

    def admin(self, action, **payload) -> AdminResult:
        op_id = f"op-{next(NUMBERS)}"
        self.inbox.put(Admin(op_id, action, payload))
        return self.next(AdminResult, lambda message: message.op_id == op_id)

    def facts(self) -> dict:
        return self.admin("model_info").data["kv_transfer"]

    def until(self, holds) -> dict:
        """The facts about transfers, once `holds(facts)` is true."""
        while not holds(facts := self.facts()):
            time.sleep(0.005)  # noqa: TID251  the stage runs in its own thread
        return facts


class Pair:
    """A prefill stage, a decode stage, and one for whole requests, with the same weights."""

    def __init__(self, prefill, decode, whole):
        self.prefill, self.decode, self.whole = prefill, decode, whole

    def kept(self, prompt, **params) -> Fetch:
        """Runs the prefill leg as with NIXL. Returns the fetch for the decode leg."""
        result = self.prefill.ask(prompt, Serve(), **params | {"max_new_tokens": 1})
        return self.fetch_of(result[PARAMS])

    @staticmethod
    def fetch_of(params, group="group") -> Fetch:
        return TransferFields("decode", "nixl").specs({PARAMS: params}, group, 1)[0]

    def room(self) -> tuple[Serve, Fetch]:
        """The specs of both legs for a new room."""
        key = room_key(next(NUMBERS))
        host, port = self.prefill.address["host"], self.prefill.address["port"]
        return Serve(key, waits=True), Fetch(host, port, key, group=key)

    def by_handle(self, prompt, **params) -> dict:
        return self.decode.ask(prompt, self.kept(prompt, **params), **params)

    def by_room(self, prompt, **params) -> dict:
        serve, fetch = self.room()
        first = self.prefill.submit(prompt, serve, **params)
        second = self.decode.submit(prompt, fetch, **params)
        result = self.decode.end(second)
        assert isinstance(result, Result), result
        assert self.prefill.end(first).data["usage"]["completion_tokens"] == 1
        return result.data


__all__ = ["GREEDY", "Pair", "Stage", "long_prompt", "stage"]
