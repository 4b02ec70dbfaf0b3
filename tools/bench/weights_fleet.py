"""Weights through a whole fleet: a trainer, the proxy, a replica of smollm2-135m behind it.

`coordinate`: the replica is the trainer's receiver. `receive`: the proxy is, and relays. Each is
taken from outside; a plain gloo broadcast seconds before is what a figure is divided by.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tools.bench import report
from tools.bench.processes import running
from tools.training.endpoint import Endpoint
from tools.training.sync import Sync, Wishes

MODEL = "smollm2-135m"
READY_SECS = 90.0
CALL_SECS = 120.0
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
LAG = re.compile(r'^\w*event_loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


class FleetError(Exception):
    """The fleet did not do what the bench asks of it; the text says what it said."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running proxy with one replica."""

    proxy: str
    replica: str


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` is GB/s, seconds or milliseconds, as `what` says; `by_plain` a ratio, where it is a
    rate."""

    what: str
    value: float
    by_plain: float | None = None


@contextmanager
def fleet(mode: str) -> Iterator[Fleet]:
    """Ready to be asked. Raises FleetError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        log = stack.enter_context((folder / "log").open("w+"))
        at = Fleet(f"http://127.0.0.1:{_free_port()}", f"http://127.0.0.1:{_free_port()}")
        file = folder / "proxy.toml"
        port = at.proxy.rpartition(":")[2]
        file.write_text(CONFIG.format(port=port, mode=mode, worker=at.replica))
        words = ["replica", "--model", MODEL, "--threads", "1", "--log-level", "error"]
        words += ["--port", at.replica.rpartition(":")[2]]
        stack.enter_context(running(_program(*words), log))
        proxy = stack.enter_context(running(_program("--config", str(file)), log))
        try:
            _until_routable(at, proxy)
            yield at
        except (FleetError, httpx.HTTPError) as error:
            log.seek(0)
            raise FleetError(f"{mode}: {error}\n{log.read()[-2000:]}") from error


def through(mode: str, plain: Callable[[], float], rounds: int) -> list[list[Figure]]:
    """Round by round; `plain` gives GB/s. Raises FleetError."""
    from tools.training.learner import Learner

    tensors = Learner(MODEL, steps=1).named()
    with fleet(mode) as at:
        found = []
        for number in range(rounds + 1):
            rate = plain()
            before = _lags(at.proxy)
            figures = _sync(at, tensors, f"{mode}-{number}", rate)
            figures.append(Figure("p99 lateness of the loop, at most ms", _p99(at.proxy, before)))
            if mode == "receive":
                figures += _late_joiner(at, rate)
            if number:  # the first one imports, and touches memory
                found.append(figures)
        return found


def _sync(at: Fleet, tensors: Mapping[str, Any], label: str, plain: float) -> list[Figure]:
    endpoint = Endpoint(at.proxy, CALL_SECS)
    try:
        done = Sync(endpoint, tensors, label, Wishes(bucket_bytes=1 << 26)).run()
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
    """What a worker that comes late is told to do, of the version that the store holds."""
    with httpx.Client(timeout=CALL_SECS, trust_env=False) as client:
        held = client.get(f"{at.proxy}/weights/versions").json()["versions"][0]
        body = {"model_path": held["path"], "weight_version": held["version"]}
        started = time.monotonic()
        told = client.post(f"{at.replica}/update_weights_from_disk", json=body).json()
        loaded = time.monotonic() - started
        if not told.get("success"):
            raise FleetError(f"update_weights_from_disk: {told.get('message')}")
        started = time.monotonic()
        client.post(f"{at.replica}/weights_checker", json={"action": "checksum"})
        digested = time.monotonic() - started
    rate = held["bytes"] / loaded / 1e9
    return [
        Figure("late joiner: load and apply, GB/s", rate, rate / plain),
        Figure("late joiner: its digest, s", digested),
    ]


def rows_of(mode: str, rounds: list[list[Figure]]) -> list[list[str]]:
    wanted = {
        "late joiner: load and apply, GB/s": "at least 1.2",
        "p99 lateness of the loop, at most ms": "10",
    }
    rows = []
    for number, figure in enumerate(rounds[0]):
        same = [each[number] for each in rounds]
        ratios = [each.by_plain for each in same if each.by_plain is not None]
        shown = report.spread([each.value for each in same], 2)
        by_plain = report.spread(ratios, 2) if ratios else ""
        rows.append([f"{mode}: {figure.what}", shown, by_plain, wanted.get(figure.what, "")])
    return rows


def _until_routable(at: Fleet, proxy: subprocess.Popen[str]) -> None:
    give_up_at = time.monotonic() + READY_SECS
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < give_up_at:
            if proxy.poll() is not None:
                raise FleetError("the proxy has ended")
            try:
                told = client.get(f"{at.proxy}/workers").json()
                if told["routable_workers"] == 1 and told["workers"][0]["weight_version"]:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            _pause(0.1)
    raise FleetError(f"not routable within {READY_SECS:g} s")


def _until_answered(proxy: str, label: str) -> None:
    """One request that only the new version may answer: it waits in the proxy's queue for it."""
    with httpx.Client(timeout=CALL_SECS, trust_env=False) as client:
        headers = {"x-omni-weight-version": f"={label}"}
        answer = client.post(f"{proxy}/v1/chat/completions", json=CHAT, headers=headers)
    if answer.status_code != 200:
        raise FleetError(f"no answer by {label}: {answer.status_code} {answer.text[:200]}")


def _lags(proxy: str) -> dict[float, float]:
    """How often the loop was at most so late, cumulated, by seconds."""
    with httpx.Client(timeout=5, trust_env=False) as client:
        text = client.get(f"{proxy}/metrics").text
    return {float(le): float(count) for le, count in LAG.findall(text)}


def _p99(proxy: str, before: Mapping[float, float]) -> float:
    """Milliseconds; the bound of the histogram's bucket in which it lies."""
    counts = {le: count - before.get(le, 0.0) for le, count in _lags(proxy).items()}
    total = max(counts.values(), default=0.0)
    within = [le for le, count in counts.items() if count >= 0.99 * total]
    return 1000 * min(within, default=float("nan"))


def _program(*words: str) -> list[str]:
    return [sys.executable, "-m", "omni_proxy", *words]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


def _pause(secs: float) -> None:
    # Another process can only be asked again and again.
    time.sleep(secs)  # noqa: TID251  no event loop runs here
