"""The text stage's scheduler of a prefill or decode replica.

    prefill  [room: wait for decode] ──> queue ──> one token ──> [room: wait until it is fetched]
    decode   fetch ──> queue ──> the first token from the fetched logits ──> decode as usual
Invariant: a KV is used only with the weights that it was computed with. With other weights, its
request fails with a KVTransferError, or its prompt is recomputed here if the KV was already
accepted. If a request ends early, its transfer ends, too, and the other replica is notified.
Requests without a transfer are scheduled as on any other replica.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, cast

from torch import Tensor

from omni_proxy.replica.kv_transfer.export_table import Export
from omni_proxy.replica.kv_transfer.request_fields import (
    PARAMS,
    Fetch,
    Serve,
    TransferSpec,
    kept_key,
    nixl_params,
)
from omni_proxy.replica.kv_transfer.thread_messages import (
    Fetched,
    FetchFailed,
    FetchOrder,
    Leg,
    LegDone,
    LegFailed,
    LegMatched,
    Post,
    ThreadEnded,
    TransferEvent,
)
from omni_proxy.replica.kv_transfer.transfer_thread import TransferThread
from omni_proxy.replica.kv_transfer.wire import KV_ERROR, Identity, prompt_digest
from omni_proxy.replica.models.kv import PAGE_TOKENS, SequenceKV, kv_bytes
from omni_proxy.replica.models.text_model import ModelWorker, weights_digest
from omni_proxy.replica.pipeline.stage_messages import Emit, Result, StageFailure, StageInput
from omni_proxy.replica.text.json_schema import CompiledConstraint
from omni_proxy.replica.text.operations import OperationOutcome, StepDone
from omni_proxy.replica.text.prompt import Prompt
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.sequence import Sequence

NO_ROOM = "there is no memory to keep the KV: raise --kv-max-bytes, or fetch sooner"


@dataclass(slots=True, eq=False)
class _Fetching:
    """One running fetch and the requests that wait for it. `generation` counts weight changes."""

    order: FetchOrder
    generation: int
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True, eq=False)
class _Import:
    """A fetched KV until its request starts; then `nbytes` are given back to the budget."""

    kv: SequenceKV
    logits: Tensor
    cached_tokens: int
    generation: int
    nbytes: int


class TransferScheduler(TextScheduler):
    """A TextScheduler with KV transfers; `run` starts `transfers` and closes it at its end."""

    def __init__(self, stage_name: str, transfers: TransferThread, *parts: Any) -> None:
        super().__init__(stage_name, *parts)
        self._transfers = transfers
        self._generation = 0  # of the weights
        # Slow to compute: done at the start, and after a change of the weights when first needed.
        self._digest = weights_digest(self.worker)
        self._pending: list[Prompt] = []  # arrived while the weights were being changed
        self._specs: dict[str, TransferSpec] = {}  # of requests whose transfer has begun
        self._ready: set[str] = set()  # may join the queue: decode connected, or the KV is fetched
        self._legs: dict[str, Leg] = {}  # prefill: announced, and not ended
        self._unmet: dict[str, Prompt] = {}  # prefill: decode has not connected yet
        self._logits: Tensor | None = None  # of the sequence that is being advanced
        self._handing_over: dict[str, dict[str, Any]] = {}  # prefill: results until KVs are fetched
        self._fetching: dict[str, _Fetching] = {}  # decode: by group
        self._imports: dict[str, _Import] = {}
        host, port = transfers.address
        self._facts = {"engine_id": transfers.engine_id, "host": host, "port": port}
        self.info |= {"kv_transfer": self._facts}
        self.register_admin("release_kv", self._release_kept)
        facts = self.admin_actions["model_info"]

        def model_info(payload: dict[str, Any]) -> OperationOutcome:
            success, message, data, error = facts(payload)
            return success, message, data | {"kv_transfer": self._transfer_facts()}, error

        self.register_admin("model_info", model_info)

    def run(self, inbox: SimpleQueue[StageInput], emit: Emit) -> None:
        # The transfer thread posts its events; the inbox's type has only the pipeline's messages.
        self._transfers.start(cast("Post", inbox.put))
        try:
            super().run(inbox, emit)
        finally:
            self._transfers.close()

    # Messages

    def take(self, message: StageInput | StepDone | CompiledConstraint | TransferEvent) -> None:
        if isinstance(message, TransferEvent):
            self._take_event(message)
        else:
            super().take(message)
        if self._pending and not self._slow.halting:
            pending, self._pending = self._pending, []
            for prompt in pending:
                self._enqueue(prompt)

    def _take_event(self, event: TransferEvent) -> None:
        match event:
            case LegMatched(leg):
                self._on_matched(leg)
            case LegDone(leg):
                self._on_handed_over(leg)
            case LegFailed(leg, reason):
                if self._legs.get(leg.request_id) is leg:
                    self._fail_transfer(leg.request_id, reason)
            case Fetched():
                self._on_fetched(event)
            case FetchFailed(order, reason):
                if fetching := self._take_fetching(order):
                    for prompt in fetching.prompts:
                        self._fail_transfer(prompt.request_id, reason)
            case ThreadEnded(reason):
                raise RuntimeError(f"the thread that transfers KVs has ended: {reason}")

    def _enqueue(self, prompt: Prompt) -> None:
        is_waiting = self._idle is not None
        if is_waiting or prompt.transfer is None or prompt.request_id in self._ready:
            super()._enqueue(prompt)
        elif self._slow.halting:  # half-changed weights have no valid digest
            self._pending.append(prompt)
        elif isinstance(prompt.transfer, Fetch):
            self._begin_fetch(prompt, prompt.transfer)
        else:
            self._begin_serve(prompt, prompt.transfer)

    def _refuse(self, request_id: str, reason: str) -> None:
        self.emit(StageFailure(request_id, self._stage, reason, "caller"))

    # Prefill

    def _begin_serve(self, prompt: Prompt, spec: Serve) -> None:
        request_id = prompt.request_id
        if spec.key and spec.key in {leg.key for leg in self._legs.values()}:
            self._refuse(request_id, f"{spec.key} is in use by another request: each needs its own")
            return
        if not spec.waits and prompt.max_new_tokens != 1:
            self._refuse(request_id, f"{PARAMS}.do_remote_decode needs a limit of one token")
            return
        self._specs[request_id] = spec
        if spec.key:
            leg = Leg(spec.key, request_id, prompt_digest(prompt.token_ids), spec.waits)
            self._legs[request_id] = leg
            self._transfers.announce(leg)
        if spec.waits:
            # Decode generates the rest; prefill makes one token, as in SGLang.
            self._unmet[request_id] = replace(prompt, max_new_tokens=1)
        else:
            self._ready.add(request_id)
            super()._enqueue(prompt)

    def _on_matched(self, leg: Leg) -> None:
        if self._legs.get(leg.request_id) is leg:
            self._ready.add(leg.request_id)
            super()._enqueue(self._unmet.pop(leg.request_id))

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        self._logits = logits
        try:
            super()._advance(sequence, logits)
        finally:
            self._logits = None

    def _emit_sequence_result(self, sequence: Sequence, data: dict[str, Any]) -> None:
        spec, request_id = sequence.prompt.transfer, sequence.request_id
        if not isinstance(spec, Serve) or sequence.finish_reason == "abort":
            self._end_transfer(request_id, "the prefill request was aborted")
            super()._emit_sequence_result(sequence, data)
        elif spec.waits:
            self._handing_over[request_id] = data
            self._transfers.hand_over(self._legs[request_id], self._export(sequence, spec.key))
        else:
            self._keep(sequence, spec, data)

    def _keep(self, sequence: Sequence, spec: Serve, data: dict[str, Any]) -> None:
        """Keep the KV and emit the result, which has the key if the request had none."""
        request_id = sequence.request_id
        handle = f"{request_id}-{secrets.token_hex(8)}"
        export = self._export(sequence, spec.key or kept_key(handle))
        # A stream has no field for the key of the KV.
        nameless = sequence.prompt.streamed and not spec.key
        kept = not nameless and self._transfers.table.keep(export)
        if spec.key and not kept:
            self._fail_transfer(request_id, NO_ROOM)
            return
        if kept:
            self._transfers.kept(export.key)
            self._legs.pop(request_id, None)  # decode may connect at any time
        if kept and not spec.key:
            address, engine = self._transfers.address, self._transfers.engine_id
            blocks = -(-export.tokens // PAGE_TOKENS)
            data = data | {PARAMS: nixl_params(handle, engine, address, blocks)}
        self._end_transfer(request_id, "")
        super()._emit_sequence_result(sequence, data)

    def _export(self, sequence: Sequence, key: str) -> Export:
        assert sequence.kv is not None
        assert self._logits is not None
        tokens = sequence.prompt.token_ids
        return Export(
            key=key,
            request_id=sequence.request_id,
            prompt=prompt_digest(tokens),
            tokens=len(tokens),
            cached_tokens=sequence.cached_tokens,
            identity=self._identity(),
            kv=sequence.kv,
            logits=self._logits.clone(),
        )

    def _on_handed_over(self, leg: Leg) -> None:
        if self._legs.get(leg.request_id) is leg:
            data = self._handing_over[leg.request_id]
            self._end_transfer(leg.request_id, "")
            self.emit(Result(leg.request_id, self._stage, data))

    # Decode

    def _begin_fetch(self, prompt: Prompt, fetch: Fetch) -> None:
        fetching = self._fetching.get(fetch.group)
        if fetching is not None and not self._may_share(fetching, prompt):
            reason = f"{fetch.key} is in use by another request: each needs its own"
            self._refuse(prompt.request_id, reason)
            return
        self._specs[prompt.request_id] = fetch
        if fetching is not None:
            fetching.prompts.append(prompt)
            return
        order = FetchOrder(
            fetch,
            prompt_digest(prompt.token_ids),
            len(prompt.token_ids),
            self._identity(),
            self.worker.new_kv(),
            self.worker.vocabulary,
        )
        self._fetching[fetch.group] = _Fetching(order, self._generation, [prompt])
        self._transfers.fetch(order)

    def _may_share(self, fetching: _Fetching, prompt: Prompt) -> bool:
        """Whether this is another choice of the same request; a room has only one choice."""
        is_room = fetching.order.fetch.group == fetching.order.fetch.key
        return not is_room and fetching.prompts[0].token_ids == prompt.token_ids

    def _take_fetching(self, order: FetchOrder) -> _Fetching | None:
        """Remove and return the order's fetch; None if its requests were all dropped."""
        fetching = self._fetching.get(order.fetch.group)
        if fetching is None or fetching.order is not order:
            return None
        return self._fetching.pop(order.fetch.group)

    def _on_fetched(self, fetched: Fetched) -> None:
        order, fetching = fetched.order, self._take_fetching(fetched.order)
        nbytes = kv_bytes(order.kv, order.tokens)
        if fetching is None:
            self._transfers.give_back(nbytes)
            return
        label = order.identity.weight_version
        if (fetching.generation, label) != (self._generation, self.weight_version):
            self._transfers.give_back(nbytes)
            for prompt in fetching.prompts:
                self._fail_transfer(prompt.request_id, "the weights changed while it was fetched")
            return
        for index, prompt in enumerate(fetching.prompts):
            kv = order.kv.fork(order.tokens) if index else order.kv
            self._imports[prompt.request_id] = _Import(
                kv, fetched.logits, fetched.cached_tokens, self._generation, 0 if index else nbytes
            )
            self._ready.add(prompt.request_id)
        for prompt in fetching.prompts:
            super()._enqueue(prompt)

    def _start(self, sequence: Sequence) -> None:
        imported = self._take_import(sequence.request_id)
        if imported is None or imported.generation != self._generation:
            super()._start(sequence)
            return
        sequence.begin(imported.kv, self.cache.epoch)
        sequence.cached_tokens = imported.cached_tokens
        self._metrics.prompt_tokens += len(sequence.prompt.token_ids)
        self._metrics.cached_tokens += imported.cached_tokens
        facts = {"cached_tokens": imported.cached_tokens}
        self.record("scheduler_prefill_start", sequence.request_id, facts)
        self._advance(sequence, imported.logits)

    def _take_import(self, request_id: str) -> _Import | None:
        imported = self._imports.pop(request_id, None)
        if imported is not None and imported.nbytes:
            self._transfers.give_back(imported.nbytes)
        return imported

    # Ends

    def active_ids(self) -> list[str]:
        waiting = [prompt.request_id for prompt in self._not_queued()]
        return super().active_ids() + waiting + list(self._handing_over)

    def _not_queued(self) -> list[Prompt]:
        fetching = [prompt for fetch in self._fetching.values() for prompt in fetch.prompts]
        return [*self._pending, *self._unmet.values(), *fetching]

    def _unbegun(self) -> list[Prompt]:
        return super()._unbegun() + self._not_queued()

    def _forget(self, request_id: str) -> int:
        own = [prompt for prompt in self._not_queued() if prompt.request_id == request_id]
        count = len(own) + (request_id in self._handing_over)
        self._end_transfer(request_id, "the request was aborted")
        return count + super()._forget(request_id)

    def _end_early(self, request_id: str) -> None:
        data = self._handing_over.get(request_id)
        if data is None:
            super()._end_early(request_id)
            return
        self._metrics.aborted += 1
        self._end_transfer(request_id, "the prefill request was aborted")
        self.emit(Result(request_id, self._stage, data | {"finish_reason": "abort"}))

    def _fail(self, request_id: str, error: Exception) -> None:
        self._end_transfer(request_id, f"the request failed: {error}")
        super()._fail(request_id, error)

    def _fail_transfer(self, request_id: str, reason: str) -> None:
        """Fail a request whose transfer failed, in any state; does nothing if it has ended."""
        if request_id in self._specs:
            self._end_transfer(request_id, reason)
            super()._forget(request_id)
            text = f"{KV_ERROR}: {reason}"
            self.emit(StageFailure(request_id, self._stage, text, "server"))

    def drop_all(self) -> int:
        dropped = super().drop_all()
        for request_id in [*self._specs, *(prompt.request_id for prompt in self._pending)]:
            self._end_transfer(request_id, "the request was dropped by an admin action")
        return dropped

    def _end_transfer(self, request_id: str, reason: str) -> None:
        """Drop this request's transfer; if it has not ended, send `reason` to the other replica."""
        spec = self._specs.pop(request_id, None)
        self._ready.discard(request_id)
        self._unmet.pop(request_id, None)
        self._handing_over.pop(request_id, None)
        self._pending = [prompt for prompt in self._pending if prompt.request_id != request_id]
        self._take_import(request_id)
        leg = self._legs.pop(request_id, None)
        if leg is not None:
            self._transfers.withdraw(leg, reason)
        if isinstance(spec, Fetch):
            self._leave_fetch(spec.group, request_id)

    def _leave_fetch(self, group: str, request_id: str) -> None:
        fetching = self._fetching.get(group)
        if fetching is None:
            return
        fetching.prompts = [
            prompt for prompt in fetching.prompts if prompt.request_id != request_id
        ]
        if not fetching.prompts:
            del self._fetching[group]
            self._transfers.cancel(fetching.order)

    # Weights

    def weights_changed(self) -> None:
        super().weights_changed()
        self._generation += 1
        self._digest = ""
        self._transfers.table.drop(lambda _: True, "the weights have changed since")

    def _identity(self) -> Identity:
        """The identity of this model; not valid while an operation changes weights."""
        if not self._digest:
            self._digest = weights_digest(self.worker)
        return identity(self.worker, self.weight_version, self._digest)

    # Operations

    def _release_kept(self, payload: dict[str, Any]) -> OperationOutcome:
        """Free the kept KVs of ended requests: of `ids`, of ids with a `prefix`, or `all`."""
        ids, prefix = set(payload.get("ids", ())), str(payload.get("prefix") or "")

        def wanted(export: Export) -> bool:
            own = export.request_id
            base, _, number = own.rpartition("-")
            listed = own in ids or (number.isdecimal() and base in ids)
            return bool(payload.get("all")) or listed or bool(prefix and own.startswith(prefix))

        count = self._transfers.table.drop(wanted, "its request was aborted")
        return True, "ok", {"released": count}, None

    def _transfer_facts(self) -> dict[str, Any]:
        return {
            **self._facts,
            "kept": len(self._transfers.table),
            "kept_bytes": self._transfers.table.nbytes,
            "waiting": len(self._unmet) + len(self._handing_over),
            "fetching": len(self._fetching),
        }


def identity(worker: ModelWorker, weight_version: str, weights: str) -> Identity:
    config = worker.text.model.config
    return Identity(
        model=worker.text.name,
        sizes=", ".join(f"{name} {value}" for name, value in asdict(config).items()),
        dtype=worker.dtype,
        weight_version=weight_version,
        weights=weights,
    )
