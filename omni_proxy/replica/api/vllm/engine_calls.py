"""What vLLM's control routes ask of the pipeline: admin actions, and their errors in vLLM's words.

Invariant: holds the only state of these routes, which parts of the engine sleep; whether it is
paused is the stages' to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

from omni_proxy.replica.api.native.admin_operations import ModelFacts, model_facts
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, worker_error

PauseChoice = Literal["abort", "wait", "keep"]
PAUSE_MODES: Final[tuple[PauseChoice, ...]] = ("abort", "wait", "keep")
SLEEPING_PARTS: Final = ("weights", "kv_cache")
SCHEDULING: Final = "scheduling"
CONTROL_SECS: Final = 60.0
WAIT_SECS: Final = 3600.0  # for requests that end by themselves, and for a trainer
ID_PREFIXES: Final = ("chatcmpl-", "cmpl-", "generate-tokens-")


class EngineCalls:
    """One for each app."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._asleep: set[str] = set()

    async def run(
        self, action: str, payload: dict[str, Any] | None = None, secs: float = CONTROL_SECS
    ) -> dict[str, Any]:
        """The data of the stage that did it; raises VllmError 500 where a stage refused."""
        aggregate = await self._context.client.admin(action, payload or {}, None, secs)
        if not aggregate["success"]:
            raise worker_error(str(aggregate["message"]))
        for result in aggregate["results"]:
            if not result["data"].get("skipped"):
                data: dict[str, Any] = result["data"]
                return data
        raise VllmError(501, f"no stage of this pipeline knows {action}")

    async def facts(self) -> ModelFacts:
        return model_facts(await self._context.client.admin("model_info", {}, None, CONTROL_SECS))

    # Pause and sleep

    async def pause(self, mode: PauseChoice, *, clear_cache: bool = True) -> None:
        """Returns once nothing is computed any more; new requests wait for `resume`."""
        match mode:
            case "keep":
                await self.run("pause_generation", {"mode": "in_place"})
                return
            case "wait":
                await self.run("pause_when_idle", {}, WAIT_SECS)
            case "abort":
                await self.run("pause_generation", {"mode": "in_place"})
                self._context.client.end_early(lambda _: True)
        # Answered after every stage has ended its requests: they share an inbox.
        await self.run("flush_cache" if clear_cache else "model_info")

    async def resume(self) -> None:
        await self.run("continue_generation")

    async def is_paused(self) -> bool:
        facts = await self.facts()
        return any(stage["data"].get("paused") for stage in facts.stages)

    async def sleep(self, level: int, mode: PauseChoice) -> None:
        """From level 1 on the prefix cache is dropped; the weights stay where they are."""
        await self.pause(mode, clear_cache=level >= 1)
        if level >= 1:
            await self.run("flush_cache")
            self._asleep.update(SLEEPING_PARTS)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Whether all is awake, so that requests continue; no tags: wake everything."""
        self._asleep -= set(tags or SLEEPING_PARTS)
        if self._asleep:
            return False
        await self.resume()
        return True

    async def is_sleeping(self) -> bool:
        return bool(self._asleep) or await self.is_paused()

    # Requests

    def abort(self, request_ids: Sequence[str]) -> int:
        """End these requests with what they have; how many were live."""
        return len(self._context.client.end_early(id_matcher(request_ids)))

    def abort_all(self) -> int:
        return len(self._context.client.end_early(lambda _: True))

    def world_size(self) -> int:
        infos = self._context.client.stage_info().values()
        return max((info.get("tp_size", 1) for info in infos), default=1)


def id_matcher(wanted: Iterable[str]) -> Callable[[str], bool]:
    """Ids as the caller sent them or as the responses have them; with all choices of a request."""
    names = set(wanted)
    names |= {bare_id(name) for name in names}

    def matches(request_id: str) -> bool:
        bare = bare_id(request_id)
        return not names.isdisjoint((request_id, bare, without_choice(bare)))

    return matches


def bare_id(request_id: str) -> str:
    """Without the prefix that vLLM's routes put before an id."""
    for prefix in ID_PREFIXES:
        if request_id.startswith(prefix):
            return request_id[len(prefix) :]
    return request_id


def without_choice(request_id: str) -> str:
    """`a-3` is choice 3, or prompt 3, of request `a`."""
    base, dash, number = request_id.rpartition("-")
    return base if dash and number.isdecimal() else request_id
