"""python -m tools.bench.client_comparison --aiperf FILE: compares `omni-proxy bench` with aiperf.

Both send the requests of one trace, at its times, through one proxy to the same two workers, and
should report the same first-token times, times between tokens, and tokens per second. The workers'
delays depend only on their requests in flight, and use no CPU, so the results depend mainly on the
requests' times. NVIDIA's aiperf is a package: install it (`pip install aiperf`) in a separate
environment; FILE is its program.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import trio

from tools.bench.harness import report
from tools.bench.harness.load_run import started
from tools.bench.harness.processes import end_on_signals
from tools.bench.harness.proxies import omni_command, proxy
from tools.bench.harness.simulated_worker import next_request

FIRST_TOKEN_SECS = 0.12
TOKEN_SECS = 0.02
SECS_PER_REQUEST = 0.002  # added to each delay per request in flight
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
FIGURES = {  # name, ours, aiperf's
    "first token, mean ms": (("first_token_ms", "mean"), ("time_to_first_token", "avg")),
    "first token, p50 ms": (("first_token_ms", "p50"), ("time_to_first_token", "p50")),
    "first token, p99 ms": (("first_token_ms", "p99"), ("time_to_first_token", "p99")),
    "between tokens, mean ms": (("between_tokens_ms", "mean"), ("inter_token_latency", "avg")),
    "between tokens, p50 ms": (("between_tokens_ms", "p50"), ("inter_token_latency", "p50")),
    "between tokens, p99 ms": (("between_tokens_ms", "p99"), ("inter_token_latency", "p99")),
    "total, mean ms": (("total_ms", "mean"), ("request_latency", "avg")),
    "answer tokens a second": (("output_tokens_per_sec",), ("output_token_throughput", "avg")),
    "requests a second": (("requests_per_sec",), ("request_throughput", "avg")),
}


# Run by aiperf's Python: builds a tokenizer with one token per byte, because named tokenizers would
# have to be downloaded. The workers count tokens independently.
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(sys.argv[1])
"""


class StreamingEngine:
    """A worker that streams `max_tokens` tokens, one per event, and their usage."""

    def __init__(self) -> None:
        self.port = 0
        self._in_flight = 0

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._connection, [listener])

    async def _connection(self, stream: trio.SocketStream) -> None:
        rest = b""
        try:
            while (found := await next_request(stream, rest)) is not None:
                head, body, rest = found
                if not head.startswith(b"POST"):
                    await stream.send_all(JSON_HEAD % (2, b"{}"))
                    continue
                self._in_flight += 1
                try:
                    await self._answer(stream, json.loads(body))
                finally:
                    self._in_flight -= 1
        except trio.BrokenResourceError:
            pass  # the proxy has closed it

    async def _answer(self, stream: trio.SocketStream, body: dict[str, object]) -> None:
        most = body.get("max_tokens") or body.get("max_completion_tokens")
        tokens, prompt = int(str(most or 16)), len(str(body["messages"]).split())
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        if not body.get("stream"):
            text = json.dumps({"id": "chatcmpl-first", "choices": [], "usage": usage}).encode()
            await stream.send_all(JSON_HEAD % (len(text), text))
            return
        await stream.send_all(HEAD)
        due = trio.current_time()
        for number in range(tokens):
            due += (TOKEN_SECS if number else FIRST_TOKEN_SECS) + SECS_PER_REQUEST * self._in_flight
            await trio.sleep_until(due)
            end = "length" if number == tokens - 1 else None
            choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": end}
            await _send(stream, {"id": "c", "object": "chat.completion.chunk", "choices": [choice]})
        await _send(
            stream, {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}
        )
        await stream.send_all(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _send(stream: trio.SocketStream, event: dict[str, object]) -> None:
    await stream.send_all(_chunk(b"data: %b\n\n" % json.dumps(event).encode()))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def write_trace(folder: Path, requests: int, per_sec: float) -> tuple[Path, Path]:
    """Write a trace in Mooncake's format: even arrivals, answers of 20 to 100 tokens, no sharing.

    aiperf gets the same trace with the prompts as text, because it would have to download a
    tokenizer to generate them.
    """
    rows = [
        {
            "timestamp": round(1000 * number / per_sec),
            "input_length": 64 + 16 * (number % 7),
            "output_length": 20 + 13 * number % 81,
        }
        for number in range(requests)
    ]
    ours, theirs = folder / "trace.jsonl", folder / "trace-with-texts.jsonl"
    ours.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with theirs.open("w") as file:
        for number, row in enumerate(rows):
            text = " ".join([str(number), *["word"] * (row.pop("input_length") - 1)])
            file.write(f"{json.dumps({**row, 'text_input': text})}\n")
    return ours, theirs


def _ours(url: str, file: Path) -> dict[str, object]:
    argv = [sys.executable, "-m", "omni_proxy", "bench", url, "--model", "bench"]
    argv += ["--trace", str(file), "--json"]
    reported = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, object] = json.loads(reported)
    return found


def _aiperf(program: Path, url: str, file: Path, folder: Path) -> dict[str, object]:
    argv = [
        str(program), "profile", "--model", "bench", "--url", url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(folder.parent / "tokenizer"), "--use-server-token-count",
        "--use-legacy-max-tokens", "--input-file", str(file),
        "--custom-dataset-type", "mooncake-trace", "--fixed-schedule", "--ui", "none",
        "--workers-max", "1",
        "--output-artifact-dir", str(folder),
    ]  # fmt: skip
    subprocess.run(argv, stdout=sys.stderr, check=True)
    (reported,) = folder.rglob("profile_export_aiperf.json")
    found: dict[str, object] = json.loads(reported.read_text())
    return found


def _figure(found: object, path: tuple[str, ...]) -> float:
    for key in path:
        found = found[key] if isinstance(found, dict) else None
    return float(str(found))


@contextmanager
def _proxy(ports: list[int]) -> Iterator[str]:
    with started(proxy(omni_command(), "omni-proxy"), ports) as (port, _):
        yield f"http://127.0.0.1:{port}"


async def _compare(arguments: argparse.Namespace) -> list[dict[str, tuple[float, float]]]:
    engines = [StreamingEngine() for _ in range(2)]
    rounds = []
    async with trio.open_nursery() as nursery:
        for engine in engines:
            await nursery.start(engine.serve)
        rounds = await trio.to_thread.run_sync(_rounds, arguments, [each.port for each in engines])
        nursery.cancel_scope.cancel()
    return rounds


def _rounds(
    arguments: argparse.Namespace, ports: list[int]
) -> list[dict[str, tuple[float, float]]]:
    rounds = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-proxy-bench-")))
        url = stack.enter_context(_proxy(ports))
        trace, its = write_trace(folder, arguments.requests, arguments.rate)
        python = arguments.aiperf.parent / "python"
        subprocess.run([python, "-c", TOKENIZER, str(folder / "tokenizer")], check=True)
        for number in range(arguments.rounds):
            ours = _ours(url, trace)
            theirs = _aiperf(arguments.aiperf, url, its, folder / f"aiperf-{number}")
            rounds.append(
                {
                    name: (_figure(ours, our), _figure(theirs, their))
                    for name, (our, their) in FIGURES.items()
                }
            )
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.client_comparison")
    parser.add_argument(
        "--aiperf", type=Path, required=True, metavar="FILE", help="aiperf's program"
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    end_on_signals()
    rounds = trio.run(_compare, arguments)
    print("\n".join(f"{key}: {value}" for key, value in report.machine().items()))
    rows = [["medians", "omni-proxy bench", "aiperf", "ratio"]]
    for name in FIGURES:
        ours, theirs = (median(each[name][side] for each in rounds) for side in (0, 1))
        rows.append([name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.3f}"])
    print("\n".join(report.columns(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
