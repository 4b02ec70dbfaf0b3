"""python -m tools.bench.cluster.faults: results of requests while the store or a proxy fails.

Each fault occurs once, under a closed loop: the store pauses for ten seconds; it is killed and
restarted; one proxy is disconnected from the store; one proxy is killed. A request fails if it gets
no 200 through a running proxy. At the end, every running proxy must count no requests in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import trio

from tools.bench.cluster.fleet import fetch, proxies
from tools.bench.cluster.weights import UPDATE, Traffic, post, workers
from tools.bench.harness.processes import running
from tools.bench.harness.proxies import free_port

PROXIES, WORKERS, CLIENTS = 3, 8, 48
LEASE_SECS, PAUSE_SECS = 2, 10


class Relay:
    """Bytes between one proxy and the store, until it is cut."""

    def __init__(self, store_port: int) -> None:
        self.port = 0
        self._store_port = store_port
        self._open: set[trio.CancelScope] = set()
        self.is_cut = False
        self.delay = 0.0  # seconds, each way

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._relay, [listener])

    def cut(self) -> None:
        self.is_cut = True
        for scope in self._open:
            scope.cancel()

    async def _relay(self, stream: trio.SocketStream) -> None:
        await self._drop_if_cut()
        with trio.CancelScope() as scope, contextlib.suppress(OSError, trio.BrokenResourceError):
            self._open.add(scope)
            async with (
                await trio.open_tcp_stream("127.0.0.1", self._store_port) as store,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self._copy, stream, store)
                await self._copy(store, stream)
                nursery.cancel_scope.cancel()
        self._open.discard(scope)
        await self._drop_if_cut()

    async def _copy(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        """Forward each chunk in order after `delay`, as over a slow network."""
        late, arriving = trio.open_memory_channel[tuple[float, bytes]](4096)

        async def receive() -> None:
            async with late:
                while piece := await source.receive_some(65536):
                    await late.send((trio.current_time() + self.delay, piece))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                async for when, piece in arriving:
                    await trio.sleep_until(when)
                    await target.send_all(piece)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _drop_if_cut(self) -> None:
        if self.is_cut:
            await trio.sleep_forever()  # like a network that drops all packets


@contextmanager
def store_at(port: int) -> Iterator[subprocess.Popen[str]]:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    assert program is not None, "redis-server is not installed"
    argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with running(argv, subprocess.DEVNULL) as process:
        yield process


async def measure(arguments: argparse.Namespace) -> None:
    store_port = free_port()
    relay = Relay(store_port)
    async with workers(WORKERS) as fleet, trio.open_nursery() as nursery:
        await nursery.start(relay.serve)
        with ExitStack() as stores:
            store = stores.enter_context(store_at(store_port))
            more = (
                f"[weight_sync]\nmode = 'off'\nverify = 'off'\ndrain_secs = 5\n"
                f"[cluster]\nurl = 'redis://127.0.0.1:{relay.port}'\nlease_secs = {LEASE_SECS}\n"
            )
            direct = more.replace(str(relay.port), str(store_port))
            urls = [worker.url for worker in fleet]
            async with proxies(1, urls, more) as (cut,), proxies(PROXIES - 1, urls, direct) as rest:
                ports = [port for port, _ in (cut, *rest)]
                traffic = Traffic(list(ports))
                nursery.start_soon(traffic.run, CLIENTS)
                if arguments.weights:
                    await post(ports[0], UPDATE, {"model_path": "m", "weight_version": "v1"})
                await trio.sleep(2)
                report(traffic, "before")
                store.send_signal(signal.SIGSTOP)
                await trio.sleep(PAUSE_SECS)
                store.send_signal(signal.SIGCONT)
                await trio.sleep(2 * LEASE_SECS)
                report(traffic, f"the store paused for {PAUSE_SECS} s")
                stores.close()
                await trio.sleep(2 * LEASE_SECS)
                stores.enter_context(store_at(store_port))
                await trio.sleep(2 * LEASE_SECS)
                report(traffic, "the store killed, and started anew")
                relay.cut()
                await trio.sleep(3 * LEASE_SECS)
                report(traffic, "one proxy cut off from the store")
                traffic.ports.remove(rest[0][0])
                rest[0][1].kill()
                await trio.sleep(2 * LEASE_SECS)
                report(traffic, "another proxy killed")
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.sleep(LEASE_SECS + 1)
                    for port in traffic.ports:
                        text = (await fetch(port, "/workers")).partition("\r\n\r\n")[2]
                        counts = [row["in_flight"] for row in json.loads(text)["workers"]]
                        print(f"in flight in the end, as {port} counts: {counts}")


def report(traffic: Traffic, what: str) -> None:
    print(
        f"{what}: {traffic.answered} answered, {len(traffic.failures)} failed, {traffic.wrong} "
        "with the header of another version",
        *traffic.failures[:1],
        flush=True,
    )
    traffic.answered, traffic.wrong = 0, 0
    traffic.failures.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.cluster.faults", description=__doc__
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="after an update, so that requests have version constraints",
    )
    trio.run(measure, parser.parse_args())


if __name__ == "__main__":
    main()
