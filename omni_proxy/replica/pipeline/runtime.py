"""The runtime of a pipeline: starts its stages, restarts those that ended, stops them.

    starting ──all ready──> running ──a host ends──> (back-off, restarted)
       └── a host ends ──> StartError                  ──stop──> shut down, awaited with a timeout
Invariant: except during `stop`, the end of a stage is reported to the coordinator, and the stage is
restarted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig, compile_plan
from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator
from omni_proxy.replica.pipeline.stage import StageHost, StageThread
from omni_proxy.replica.pipeline.stage_messages import (
    StageEnded,
    StageInput,
    StageOutput,
    StageReady,
)
from omni_proxy.replica.pipeline.stage_process import StageProcess
from omni_proxy.shared.backoff import Backoff

MIN_BACKOFF_SECS = 0.5
MAX_BACKOFF_SECS = 30.0
STABLE_SECS = 60.0  # after running this long, the back-off starts over
STOP_TIMEOUT_SECS = 3.0  # for the stages to end

log = logging.getLogger(__name__)


class StartError(Exception):
    """A stage could not start; the text has its name and the reason."""


class ThreadMailbox:
    """Passes messages from any thread to `receive` in the trio thread, in order."""

    def __init__(self, receive: Callable[[StageOutput], None]) -> None:
        self._receive = receive
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: deque[StageOutput] = deque()

    def post(self, message: StageOutput) -> None:
        self._waiting.append(message)
        try:
            # Several messages wake the loop only once.
            self._token.run_sync_soon(self.flush, idempotent=True)
        except trio.RunFinishedError:
            self._waiting.clear()  # the receiver has ended

    def flush(self) -> None:
        for _ in range(len(self._waiting)):
            message = self._waiting.popleft()
            try:
                self._receive(message)
            except Exception:  # otherwise one bad message would crash trio's run
                log.exception("message_lost stage=%s", message.stage)


class Runtime:
    """The hosts of all stages; also the coordinator's transport."""

    def __init__(self, stages: tuple[StageConfig, ...]) -> None:
        self.ready = trio.Event()
        self.hosts = _hosts(stages)
        self._host_of: dict[str, StageHost] = {
            name: host for host in self.hosts for name in host.stages
        }
        self._unready = set(self._host_of)
        self._reasons: dict[str, str] = {}
        self._stopping = trio.Event()
        self._ended = trio.Event()

    def send(self, stage: str, message: StageInput) -> None:
        self._host_of[stage].send(stage, message)

    async def run(self, receive: Callable[[StageOutput], None]) -> None:
        """Keep every host running until `stop`; raises StartError (in a group) before `ready`."""

        def receive_and_update(message: StageOutput) -> None:
            self._update_state(message)
            receive(message)

        mailbox = ThreadMailbox(receive_and_update)
        try:
            async with trio.open_nursery() as nursery:
                for host in self.hosts:
                    nursery.start_soon(self._supervise, host, mailbox)
        finally:
            mailbox.flush()
            self._ended.set()

    async def stop(self) -> None:
        """Shut every stage down and wait for them with a timeout."""
        self._stopping.set()
        for host in self.hosts:
            host.shut()
        with trio.move_on_after(STOP_TIMEOUT_SECS, shield=True):
            await self._ended.wait()

    def stop_waiting(self) -> None:
        """End the wait of `stop`."""
        self._ended.set()

    def _update_state(self, message: StageOutput) -> None:
        if isinstance(message, StageReady):
            self._unready.discard(message.stage)
            if not self._unready:
                self.ready.set()
        elif isinstance(message, StageEnded):
            self._reasons[message.stage] = message.error

    async def _supervise(self, host: StageHost, mailbox: ThreadMailbox) -> None:
        backoff = Backoff(MIN_BACKOFF_SECS, MAX_BACKOFF_SECS, STABLE_SECS)
        while not self._stopping.is_set():
            started_at = trio.current_time()
            await host.live(mailbox.post)
            mailbox.flush()
            if self._stopping.is_set():
                return
            reason = self._exit_reason(host)
            if not self.ready.is_set():
                raise StartError(reason)
            delay_secs = backoff.next_delay(trio.current_time() - started_at)
            log.error("stage_restarting delay=%.1fs reason=%s", delay_secs, reason)
            with trio.move_on_after(delay_secs):
                await self._stopping.wait()

    def _exit_reason(self, host: StageHost) -> str:
        reasons = [(name, self._reasons.get(name, "")) for name in host.stages]
        name, reason = next(((name, reason) for name, reason in reasons if reason), reasons[0])
        return f"stage {name}: {reason or 'it ended unexpectedly'}"


def _hosts(stages: tuple[StageConfig, ...]) -> list[StageHost]:
    hosts: list[StageHost] = [StageThread(stage) for stage in stages if not stage.process]
    hosts += (
        StageProcess(name, [stage for stage in stages if stage.process == name])
        for name in dict.fromkeys(stage.process for stage in stages if stage.process)
    )
    return hosts


@asynccontextmanager
async def open_pipeline(config: PipelineConfig) -> AsyncIterator[tuple[Coordinator, Runtime]]:
    """Start a pipeline; await `runtime.ready` for the stages. Everything is stopped on exit.

    Raises PipelineConfigError immediately, StartError (in a group) during the start.
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
