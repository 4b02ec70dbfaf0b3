"""Weights through a complete fleet: a trainer, the proxy, a replica of smollm2-135m behind it.

With `coordinate`, the replica receives from the trainer; with `receive`, the proxy does, and
relays. Both are measured from outside, as ratios to a plain gloo broadcast seconds before.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tools.bench.harness import report
from tools.bench.harness.processes import running
from tools.bench.weights.loop_delay import lateness_of
from tools.bench.weights.memory import tree, watched
from tools.training.endpoint import Endpoint
from tools.training.sync import Sync, SyncOptions

MODEL = "smollm2-135m"
READY_SECS = 90.0
CALL_SECS = 120.0
BUCKET_BYTES = 1 << 26
LATE = "p99 lateness of the loop, at most ms"
PEAK = f"buckets of {BUCKET_BYTES >> 20} MiB"
LATE_JOINER = "late joiner: load and apply, GB/s"
WANTED = {LATE_JOINER: "at least 1.2", LATE: "10", PEAK: "at most 3"}  # by how a figure ends
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
CONFIG = """\
[server]
port = {port}
queue_size = 100
[health]
interval_secs = 0.2
success_threshold = 1
on_threshold = "unhealthy"
[weight_sync]
mode = "{mode}"
verify = "checksum"
[[workers]]
url = "{worker}"
"""


class FleetError(Exception):
    """The fleet failed; the message has its output."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running proxy with one replica: their URLs, and their processes' ids."""

    proxy: str
    replica: str
    proxy_pid: int = 0
    replica_pid: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """A result; `value` is in GB/s, seconds, milliseconds or buckets, as named in `what`.

    `by_plain` is the ratio to plain gloo, for rates only.
    """

    what: str
    value: float
    by_plain: float | None = None


@contextmanager
def fleet(mode: str) -> Iterator[Fleet]:
    """Start a fleet; yields it when it is ready. Raises FleetError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        log = stack.enter_context((folder / "log").open("w+"))
        at = Fleet(f"http://127.0.0.1:{_free_port()}", f"http://127.0.0.1:{_free_port()}")
        file = folder / "proxy.toml"
        port = at.proxy.rpartition(":")[2]
        file.write_text(CONFIG.format(port=port, mode=mode, worker=at.replica))
        words = ["replica", "--model", MODEL, "--threads", "1", "--log-level", "error"]
        words += ["--port", at.replica.rpartition(":")[2]]
        replica = stack.enter_context(running(_program(*words), log))
        proxy = stack.enter_context(running(_program("--config", str(file)), log))
        at = replace(at, proxy_pid=proxy.pid, replica_pid=replica.pid)
        try:
            _until_routable(at, proxy)
            yield at
        except (FleetError, httpx.HTTPError) as error:
            log.seek(0)
            raise FleetError(f"{mode}: {error}\n{log.read()[-2000:]}") from error


def through(mode: str, plain: Callable[[], float], rounds: int) -> list[list[Figure]]:
    """The results of each round, then those of all rounds; `plain` returns GB/s.

    Raises FleetError.
    """
    from tools.training.learner import Learner

    tensors = Learner(MODEL, steps=1).named()
    with fleet(mode) as at, lateness_of(at.proxy) as late:
        _sync(at, tensors, f"{mode}-first", plain())  # warm-up: imports modules, touches memory
        peak = _peak(mode, at, tensors)  # separate, because measuring memory takes time
        found = []
        for number in range(rounds):
            rate = plain()
            with late.watching():
                figures = _sync(at, tensors, f"{mode}-{number}", rate)
            if mode == "receive":
                figures += _late_joiner(at, rate)
            found.append(figures)
        loop = Figure(LATE, late.loop_ms())
        return [
            *found,
            [loop, Figure("the same of a sleeping process, ms", late.sleeper_ms()), peak],
        ]


def _peak(mode: str, at: Fleet, tensors: Mapping[str, Any]) -> Figure:
    """Peak memory of the process tree that receives.

    The proxy maps a new file for each version, a replica reuses its buffer.
    """
    nbytes = sum(each.nbytes for each in tensors.values())
    who, root = ("proxy", at.proxy_pid) if mode == "receive" else ("replica", at.replica_pid)
    with watched(lambda: tree(root), nbytes if mode == "receive" else 0) as peak:
        _sync(at, tensors, f"{mode}-watched", 1.0)
    return Figure(f"peak extra memory of the {who}, {PEAK}", peak.extra_bytes / BUCKET_BYTES)


def _sync(at: Fleet, tensors: Mapping[str, Any], label: str, plain: float) -> list[Figure]:
    endpoint = Endpoint(at.proxy, CALL_SECS)
    try:
        done = Sync(endpoint, tensors, label, SyncOptions(bucket_bytes=BUCKET_BYTES)).run()
        if not done.ok:
            raise FleetError(done.why)
        _until_answered(at.proxy, label)
        answered = time.monotonic() - done.moved_at
    finally:
        endpoint.close()
    rate = done.nbytes / done.moved_secs / 1e9
    return [
        Figure("from prepare to complete, GB/s", rate, rate / plain),
        Figure("from prepare to the first answer by it, s", answered),
    ]


def _late_joiner(at: Fleet, plain: float) -> list[Figure]:
    """Time the update of a worker that joins late, from the version in the store."""
    with httpx.Client(timeout=CALL_SECS, trust_env=False) as client:
        held = client.get(f"{at.proxy}/weights/versions").json()["versions"][0]
        body = {"model_path": held["path"], "weight_version": held["version"]}
        started = time.monotonic()
        reported = client.post(f"{at.replica}/update_weights_from_disk", json=body).json()
        loaded = time.monotonic() - started
        if not reported.get("success"):
            raise FleetError(f"update_weights_from_disk: {reported.get('message')}")
        started = time.monotonic()
        client.post(f"{at.replica}/weights_checker", json={"action": "checksum"})
        digested = time.monotonic() - started
    rate = held["bytes"] / loaded / 1e9
    return [
        Figure(LATE_JOINER, rate, rate / plain),
        Figure("late joiner: its digest, s", digested),
    ]


def rows_of(mode: str, rounds: list[list[Figure]]) -> list[list[str]]:
    """The table's rows; the last element of `rounds` has the results of all rounds."""
    rows = []
    for found in (rounds[:-1], rounds[-1:]):
        for number, figure in enumerate(found[0]):
            same = [each[number] for each in found]
            ratios = [each.by_plain for each in same if each.by_plain is not None]
            shown = report.spread([each.value for each in same], 2)
            by_plain = report.spread(ratios, 2) if ratios else ""
            wanted = next((w for end, w in WANTED.items() if figure.what.endswith(end)), "")
            rows.append([f"{mode}: {figure.what}", shown, by_plain, wanted])
    return rows


def _until_routable(at: Fleet, proxy: subprocess.Popen[str]) -> None:
    give_up_at = time.monotonic() + READY_SECS
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < give_up_at:
            if proxy.poll() is not None:
                raise FleetError("the proxy has ended")
            try:
                reported = client.get(f"{at.proxy}/workers").json()
                if reported["routable_workers"] == 1 and reported["workers"][0]["weight_version"]:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            _pause(0.1)
    raise FleetError(f"not routable within {READY_SECS:g} s")


def _until_answered(proxy: str, label: str) -> None:
    """Send a request that requires the new version; it waits in the proxy's queue until then."""
    with httpx.Client(timeout=CALL_SECS, trust_env=False) as client:
        headers = {"x-omni-weight-version": f"={label}"}
        answer = client.post(f"{proxy}/v1/chat/completions", json=CHAT, headers=headers)
    if answer.status_code != 200:
        raise FleetError(f"no answer by {label}: {answer.status_code} {answer.text[:200]}")


def _program(*words: str) -> list[str]:
    return [sys.executable, "-m", "omni_proxy", *words]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


def _pause(secs: float) -> None:
    # Another process can only be polled.
    time.sleep(secs)  # noqa: TID251  no event loop runs here
