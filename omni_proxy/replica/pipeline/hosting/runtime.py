"""Keeps the stages of a pipeline alive: starts them, restarts what ended, stops them.

    starting ──all ready──> running ──a host ends──> (back-off, started again)
       └── a host ends ──> StartError                  ──stop──> told, waited for, left
Invariant: outside `stop`, a stage that ended is on its way back, and the coordinator was told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from omni_proxy.backoff import Backoff
from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator
from omni_proxy.replica.pipeline.hosting.stage_process import StageProcess
from omni_proxy.replica.pipeline.hosting.stage_runner import StageHost, StageThread
from omni_proxy.replica.pipeline.messages import StageEnded, StageInput, StageOutput, StageReady
from omni_proxy.replica.pipeline.plan import compile_plan

MIN_BACKOFF_SECS = 0.5
MAX_BACKOFF_SECS = 30.0
STABLE_SECS = 60.0  # alive for so long: the next end counts as a first one
STOP_TIMEOUT_SECS = 3.0  # for the stages to end by themselves

log = logging.getLogger(__name__)


class StartError(Exception):
    """A stage could not start; the text says which and why."""


class ThreadMailbox:
    """Messages from any thread to `receive` in the trio thread, in the order of their posting."""

    def __init__(self, receive: Callable[[StageOutput], None]) -> None:
        self._receive = receive
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: deque[StageOutput] = deque()

    def post(self, message: StageOutput) -> None:
        self._waiting.append(message)
        try:
            # Many messages wake the loop once.
            self._token.run_sync_soon(self.empty, idempotent=True)
        except trio.RunFinishedError:
            self._waiting.clear()  # nobody is left to hear it

    def empty(self) -> None:
        for _ in range(len(self._waiting)):
            message = self._waiting.popleft()
            try:
                self._receive(message)
            except Exception:  # trio would end everything for one bad message
                log.exception("a message of stage %s was lost", message.stage)


class Runtime:
    """The hosts of all stages; also the coordinator's switchboard."""

    def __init__(self, stages: tuple[StageConfig, ...]) -> None:
        self.ready = trio.Event()
        self.hosts = _hosts(stages)
        self._host_of: dict[str, StageHost] = {
            name: host for host in self.hosts for name in host.stages
        }
        self._unready = set(self._host_of)
        self._reasons: dict[str, str] = {}
        self._stopping = trio.Event()
        self._over = trio.Event()

    def send(self, stage: str, message: StageInput) -> None:
        self._host_of[stage].send(stage, message)

    async def run(self, receive: Callable[[StageOutput], None]) -> None:
        """Keep every host alive until `stop`; raises StartError (in a group) before `ready`."""

        def taken(message: StageOutput) -> None:
            self._note(message)
            receive(message)

        mailbox = ThreadMailbox(taken)
        try:
            async with trio.open_nursery() as nursery:
                for host in self.hosts:
                    nursery.start_soon(self._keep, host, mailbox)
        finally:
            mailbox.empty()
            self._over.set()

    async def stop(self) -> None:
        """Ask every stage to end and wait for them, a bounded time."""
        self._stopping.set()
        for host in self.hosts:
            host.shut()
        with trio.move_on_after(STOP_TIMEOUT_SECS, shield=True):
            await self._over.wait()

    def cut(self) -> None:
        """Let `stop` wait no longer."""
        self._over.set()

    def _note(self, message: StageOutput) -> None:
        if isinstance(message, StageReady):
            self._unready.discard(message.stage)
            if not self._unready:
                self.ready.set()
        elif isinstance(message, StageEnded):
            self._reasons[message.stage] = message.error

    async def _keep(self, host: StageHost, mailbox: ThreadMailbox) -> None:
        backoff = Backoff(MIN_BACKOFF_SECS, MAX_BACKOFF_SECS, STABLE_SECS)
        while not self._stopping.is_set():
            born = trio.current_time()
            await host.live(mailbox.post)
            mailbox.empty()
            if self._stopping.is_set():
                return
            reason = self._ending_of(host)
            if not self.ready.is_set():
                raise StartError(reason)
            delay_secs = backoff.next_delay(trio.current_time() - born)
            log.error("%s; starting again in %.1f s", reason, delay_secs)
            with trio.move_on_after(delay_secs):
                await self._stopping.wait()

    def _ending_of(self, host: StageHost) -> str:
        told = [(name, self._reasons.get(name, "")) for name in host.stages]
        name, reason = next((each for each in told if each[1]), told[0])
        return f"stage {name}: {reason or 'it ended unasked'}"


def _hosts(stages: tuple[StageConfig, ...]) -> list[StageHost]:
    hosts: list[StageHost] = [StageThread(stage) for stage in stages if not stage.process]
    hosts += (
        StageProcess(name, [stage for stage in stages if stage.process == name])
        for name in dict.fromkeys(stage.process for stage in stages if stage.process)
    )
    return hosts


@asynccontextmanager
async def open_pipeline(config: PipelineConfig) -> AsyncIterator[tuple[Coordinator, Runtime]]:
    """Start a pipeline; await `runtime.ready` for the stages. On leaving everything is stopped.

    Raises PipelineConfigError at once, StartError (in a group) while it starts.
    """
    plan = compile_plan(config)
    runtime = Runtime(plan.config.stages)
    coordinator = Coordinator(plan, runtime)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runtime.run, coordinator.receive)
        try:
            yield coordinator, runtime
        finally:
            coordinator.stop()
            await runtime.stop()
            nursery.cancel_scope.cancel()
