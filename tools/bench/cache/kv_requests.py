"""The cost of requests of token ids with KV events: `python -m tools.bench.cache.kv_requests`.

Eight workers have a million cached tokens each. Requests go in turn through a data plane with
`source = "inferred"` and one with `"events"`, both in this process with their clients and workers
(`hand_driven`). Measures the CPU time of their batches of events, and bytecodes. There are no
bounds. `--instructions` counts user-space instructions under valgrind instead, which doesn't depend
on other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import select
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time_ns
from types import FrameType
from typing import Any, Final, NamedTuple

from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.engine_blocks import ChangeOp, HeldChange
from tools.bench.data_plane.hand_driven import ANSWER, RECEIVE_BYTES, DrivenDataPlane
from tools.bench.data_plane.instructions import instructions_of

WORKERS = 8
CACHED_TOKENS = 1_000_000  # of each
BLOCK = 16
SEED = 13
WARM = 60  # requests
SOURCES: Final = ("inferred", "events")
CONFIG = """[server]
access_log = "off"
[routing]
policy = "cache_aware"
[routing.cache_aware]
source = "{source}"
feedback = {feedback}
max_tree_size = 67108864
"""
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:30000\r\nAccept: application/json\r\n"
    b"Content-Type: application/json\r\nUser-Agent: python-httpx/0.28\r\n"
    b"X-Request-Id: bench-%08d\r\nContent-Length: %d\r\n\r\n"
)
REPORTS = b'{"text":"%b","meta_info":{"id":"1","prompt_tokens":%d,"cached_tokens":%d}}'

Prompt = list[int]


class Case(NamedTuple):
    """A kind of request; `cached` is the share of the prompt that a worker has."""

    name: str
    tokens: int
    path: str = "/generate"
    key: str = "input_ids"
    separator: str = ","
    cached: float = 1.0


CASES: Final = (
    Case("1024 input_ids", 1024),
    Case("1024 input_ids, spaces", 1024, separator=", "),
    Case("4096 input_ids", 4096),
    Case("4096 input_ids, spaces", 4096, separator=", "),
    Case("1024 ids in prompt", 1024, "/v1/completions", "prompt"),
    Case("4096 ids in prompt", 4096, "/v1/completions", "prompt"),
    Case("1024 input_ids, new", 1024, cached=0.0),
    Case("1024 input_ids, half", 1024, cached=0.5),
    Case("1024 input_ids, a third, spaces", 1024, separator=", ", cached=0.34),
    Case("4096 input_ids, half", 4096, cached=0.5),
    Case("4096 input_ids, 0.9, spaces", 4096, separator=", ", cached=0.9),
)


class DrivenFleet(DrivenDataPlane):
    """A driven data plane with one client; with `feedback`, workers report cached tokens."""

    def __init__(self, folder: Path, case: Case, source: str, *, feedback: bool = True) -> None:
        config = CONFIG.format(source=source, feedback=str(feedback).lower())
        super().__init__(folder, config, workers=WORKERS, clients=1)
        self._case = case
        self._poll = select.poll()
        self._ends: dict[int, socket.socket] = {}
        for listener in self._listeners:
            self._poll.register(listener, select.POLLIN)
        self.spent: list[int] = []
        self.bytecodes: list[int] = []

    def fill(self, cached: list[Prompt]) -> None:
        """Distribute the prompts over the workers, in turn."""
        policy, index = self._dataplane.policy, self._dataplane.kv_blocks
        workers = self._dataplane.fleet.workers
        for number, prompt in enumerate(cached):
            worker = workers[number % WORKERS]
            begun = [HeldChange(ChangeOp.BLOCK_SIZE, [BLOCK]), HeldChange(ChangeOp.EXACT, [])]
            stored = HeldChange(ChangeOp.STORE, list(block_keys(prompt, BLOCK)))
            index.apply(worker.url, [*(begun if number < WORKERS else ()), stored])
            body = json.dumps({self._case.key: prompt}, separators=(self._case.separator, ":"))
            policy.record_pick(worker, Requirements(0, decoded=decode_body(body.encode())))

    def request(self, number: int, body: bytes, cached: int, measure: str) -> None:
        client = self.clients[0]
        path = self._case.path.encode()
        client.sendall(HEAD % (path, number, len(body)) + body)
        self._measured(measure)
        end = self._receive()
        answer = REPORTS % (b"tide " * 40, self._case.tokens, cached)
        end.sendall(ANSWER % (len(answer), answer))
        self._measured(measure)
        response = client.recv(RECEIVE_BYTES)
        assert response.endswith(answer), response

    def _measured(self, measure: str) -> None:
        if measure == "instructions":
            self._turn(counted=True)
        elif measure == "bytecodes":
            with counted_bytecodes() as counted:
                self._turn(counted=False)
            self.bytecodes.append(counted.total())
        else:
            begun = process_time_ns()
            self._turn(counted=False)
            if measure == "cpu":
                self.spent.append(process_time_ns() - begun)

    def _receive(self) -> socket.socket:
        """The worker's end of the connection that received the request."""
        listening = {listener.fileno(): listener for listener in self._listeners}
        for _ in range(100):
            for number, _ in self._poll.poll(0):
                if number in listening:
                    end = listening[number].accept()[0]
                    self._ends[end.fileno()] = end
                    self._poll.register(end, select.POLLIN)
                    self._upstream.append(end)
                else:
                    end = self._ends[number]
                    end.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while end.recv(RECEIVE_BYTES):
                            pass
                    end.setblocking(True)
                    return end
            self._turn(counted=False)
        raise AssertionError("no worker received the request")


@contextlib.contextmanager
def counted_bytecodes() -> Iterator[Counter[str]]:
    """Counts the executed bytecodes by function."""
    count: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Callable[[FrameType, str, object], Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count[frame.f_code.co_qualname] += 1
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def cached_prompts(chance: random.Random, tokens: int) -> list[Prompt]:
    count = WORKERS * CACHED_TOKENS // tokens
    return [[chance.randrange(150_000) for _ in range(tokens)] for _ in range(count)]


def sent_prompts(case: Case, cached: list[Prompt], count: int) -> list[Prompt]:
    """Distinct prompts; a worker has the case's share of each."""
    chance = random.Random(SEED + 1)
    held = int(case.cached * case.tokens)
    return [
        prompt[:held] + [chance.randrange(150_000) for _ in range(case.tokens - held)]
        for prompt in chance.sample(cached, count)
    ]


@contextlib.contextmanager
def driven_fleets(
    case: Case, cached: list[Prompt], sources: tuple[str, ...]
) -> Iterator[dict[str, DrivenFleet]]:
    with contextlib.ExitStack() as stack:
        fleets: dict[str, DrivenFleet] = {}
        for source in sources:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-proxy-bench-"))
            fleets[source] = DrivenFleet(Path(folder), case, source)
            stack.callback(fleets[source].close)
            fleets[source].fill(cached)
        yield fleets


def run_case(
    case: Case, count: int, sources: tuple[str, ...], measure: str
) -> dict[str, DrivenFleet]:
    cached = cached_prompts(random.Random(SEED), case.tokens)
    sent = sent_prompts(case, cached, WARM + count)
    held = int(case.cached * case.tokens) // BLOCK * BLOCK
    with driven_fleets(case, cached, sources) as fleets:
        for number, prompt in enumerate(sent):
            text = json.dumps({case.key: prompt}, separators=(case.separator, ":"))
            order = sources if number % 2 else sources[::-1]
            for source in order:
                kind = measure if number >= WARM else ""
                fleets[source].request(number, text.encode(), held, kind)
    return fleets


def report_case(case: Case, count: int) -> None:
    fleets = run_case(case, count, SOURCES, "cpu")
    inferred, events = (_per_request(fleets[source].spent) for source in SOURCES)
    pairs = [e / i for i, e in zip(inferred, events, strict=True)]
    few = run_case(case, 20, SOURCES, "bytecodes")
    codes = [median(_per_request(few[source].bytecodes)) for source in SOURCES]
    print(
        f"{case.name:32} inferred {median(inferred) / 1000:6.1f} us, events "
        f"{median(events) / 1000:6.1f} us, ratio {median(events) / median(inferred):.2f} "
        f"(pairs {median(pairs):.2f}); bytecodes {codes[0]:.0f}, {codes[1]:.0f}",
        flush=True,
    )


def _per_request(spent: list[int]) -> list[int]:
    """The sums per request, each of which takes two batches."""
    return [sum(pair) for pair in zip(spent[::2], spent[1::2], strict=True)]


def report_instructions(case: Case, count: int) -> None:
    counts = []
    for source in SOURCES:
        program = ["tools.bench.cache.kv_requests", "--drive", source, "--case", case.name]
        counts.append(instructions_of([*program, "--requests", str(count)]))
    print(
        f"{case.name:32} inferred {counts[0]:8.0f}, events {counts[1]:8.0f} instructions, "
        f"ratio {counts[1] / counts[0]:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures requests of token ids with KV events.")
    parser.add_argument(
        "--requests", type=int, default=600, metavar="N", help="requests per case (600)"
    )
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--instructions", action="store_true", help="with valgrind")
    parser.add_argument("--drive", choices=SOURCES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    for case in cases:
        if arguments.drive:
            run_case(case, arguments.requests, (arguments.drive,), "instructions")
            print(arguments.requests)
        elif arguments.instructions:
            report_instructions(case, arguments.requests)
        else:
            report_case(case, arguments.requests)


if __name__ == "__main__":
    main()
