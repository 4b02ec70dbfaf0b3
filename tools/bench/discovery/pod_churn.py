"""python -m tools.bench --discovery: the cost of discovery for the event loop.

The proxy runs in this process and discovers the pods of another process (`pod_cluster`), some of
which are replaced while clients send requests. Each step of each trio task, which blocks all other
tasks, is timed. CPU time is that of the step; wall time includes other programs on the core.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import trio

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.fleet.cordon_reasons import DISCOVERY_CORDONS
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.server import Server
from omni_proxy.system.fd_limit import raise_fd_limit
from omni_proxy.telemetry.logs import configure

STALL_SECS = 0.010
CONFIG = """\
[server]
port = 0
state_file = "off"
log_level = "warning"
[routing]
policy = "random"
[health]
success_threshold = 1
interval_secs = {interval}
[[discover]]
name = "pods"
api_server = "{api}"
namespace = "bench"
port = 8000
"""


class TurnMeter(trio.abc.Instrument):
    """The longest steps since the last `take`."""

    def __init__(self) -> None:
        self._begun = self._begun_cpu = self._collected = 0.0
        self.steps: list[tuple[float, float, float, str]] = []  # own CPU, CPU, wall, task
        self.count = 0
        self._collection_begun = 0.0
        self.collections: list[tuple[float, int]] = []  # garbage collections: CPU, generation
        gc.callbacks.append(self._note_collection)

    def _note_collection(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._collection_begun = time.thread_time()
        else:
            secs = time.thread_time() - self._collection_begun
            self.collections.append((secs, about["generation"]))
            self._collected += secs

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._collected = 0.0
        self._begun, self._begun_cpu = time.perf_counter(), time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        wall, cpu = time.perf_counter() - self._begun, time.thread_time() - self._begun_cpu
        self.count += 1
        if wall > STALL_SECS / 4:
            own = cpu - self._collected
            self.steps.append((own, cpu, wall, task.name.removeprefix("omni_proxy.")))

    def take(self, phase: str) -> None:
        """Print the measurements and start over."""
        steps, count = sorted(self.steps, reverse=True), self.count
        collections, self.collections = sorted(self.collections, reverse=True), []
        self.steps, self.count = [], 0
        stalls = sum(own > STALL_SECS for own, *_ in steps)
        print(f"{phase}: {count} steps, {stalls} of more than {1000 * STALL_SECS:g} ms of own CPU")
        print("  longest steps, in ms: own CPU, with garbage collection, time")
        for own, cpu, wall, task in steps[:5]:
            print(f"    {1000 * own:6.1f} {1000 * cpu:6.1f} {1000 * wall:6.1f}  {task}")
        shown = ", ".join(f"{1000 * secs:.1f} (generation {at})" for secs, at in collections[:4])
        print(f"  longest of {len(collections)} garbage collections, in ms of CPU: {shown}")


class CountingFleet(Fleet):
    """Records the number of requests sent to a worker until discovery stopped new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: dict[Worker, tuple[int, float]] = {}  # number of requests, and the time

    def cordon(self, worker: Worker, reason: str) -> None:
        super().cordon(worker, reason)
        if reason in DISCOVERY_CORDONS:
            self.stopped[worker] = sum(worker.routed.values()), time.perf_counter()

    def sent_after(self) -> int:
        return sum(sum(w.routed.values()) - count for w, (count, _) in self.stopped.items())


async def _measure(arguments: argparse.Namespace, meter: TurnMeter) -> int:
    words = [arguments.pods, arguments.replaced, arguments.secs, arguments.clients]
    command = [sys.executable, "-m", "tools.bench.discovery.pod_cluster", *map(str, words)]
    async with trio.open_nursery() as nursery:
        cluster = await nursery.start(_run, command)
        reported = await _line(cluster)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "proxy.toml"
            file.write_text(CONFIG.format(api=reported["api"], interval=arguments.interval))
            fleet = CountingFleet()
            store = ConfigStore(Startup(file, {}, (), ""), fleet)
            server = Server(store, store.fleet, Path(folder))
            configure("warning", "text")
            nursery.start_soon(server.run)
            begun = time.perf_counter()
            while sum(each.routable for each in fleet.workers) < arguments.pods:  # noqa: ASYNC110
                await trio.sleep(0.1)
            meter.take(
                f"{arguments.pods} pods found and probed in {time.perf_counter() - begun:.1f} s"
            )
            (address,) = server.data_plane.listeners.addresses()
            await cluster.stdin.send_all(json.dumps({"proxy": address}).encode() + b"\n")
            result = await _line(cluster)
            gone_at: dict[str, float] = result.pop("gone_at")
            with trio.move_on_after(10):
                while len(fleet.stopped) < len(gone_at):  # noqa: ASYNC110
                    await trio.sleep(0.1)
            meter.take(f"{arguments.replaced} of them replaced in {arguments.secs:g} s")
            _print_stops(fleet, gone_at)
            (report,) = server.discovery.reports()
            print(f"clients: {result}")
            print(f"workers: {report.workers}, failures: {report.status.failures}")
            nursery.cancel_scope.cancel()
    return 1 if fleet.sent_after() or result["failed"] or len(fleet.stopped) < len(gone_at) else 0


def _print_stops(fleet: CountingFleet, gone_at: dict[str, float]) -> None:
    """Print the time from each pod's event until its worker was stopped."""
    waits = sorted(
        1000 * (at - gone_at[str(worker.address[0])]) for worker, (_, at) in fleet.stopped.items()
    )
    if waits:
        print(
            f"{len(waits)} workers were stopped, {waits[len(waits) // 2]:.1f} ms after their event "
            f"(median; longest {waits[-1]:.1f}), and sent {fleet.sent_after()} requests after that"
        )


async def _run(command: Sequence[str], *, task_status: trio.TaskStatus[Any]) -> None:
    process = await trio.lowlevel.open_process(list(command), stdin=PIPE, stdout=PIPE)
    try:
        task_status.started(process)
        await process.wait()
    finally:
        process.kill()


async def _line(process: Any) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"\n"):
        piece = await process.stdout.receive_some(4096)
        if not piece:
            raise RuntimeError("the cluster has ended")
        text += piece
    reported: dict[str, Any] = json.loads(text)
    return reported


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench --discovery", description=__doc__)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--replaced", type=int, default=200)
    parser.add_argument("--secs", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--interval", type=float, default=10.0, help="interval of health checks")
    arguments = parser.parse_args(argv)
    raise_fd_limit()
    meter = TurnMeter()
    status: int = trio.run(_measure, arguments, meter, instruments=[meter])
    return status
