"""Records the requests that routers send to prefill and decode engines.

`python -m tools.record_legs --sglang-router PYTHON --vllm-router PROGRAM` writes those of these two
routers to tests/promises/support/legs_of_peers.json; a router that is not given keeps its records.
PYTHON is that of an environment with sglang-router 0.3.2, PROGRAM the vllm-router of 0.1.17. The
engines answer immediately and listen only on 127.0.0.1. Only the keys of the protocols are
recorded, since the routers drop others and add their own defaults; random values and ports are
replaced by names.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tools.bench.harness.processes import running
from tools.bench.harness.proxies import free_port

FILE: Final = Path(__file__).parents[1] / "tests" / "promises" / "support" / "legs_of_peers.json"
READY_SECS: Final = 60.0
LATE_SECS: Final = 5.0
# The keys of a body that the protocols add or change. vllm-router also sends `min_tokens: 1` to
# prefill; omni-proxy omits it, which has the same effect.
KEYS: Final = (
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "stream",
    "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "n",
)  # fmt: skip
_CHAT: Final = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
_COMPLETION: Final = {"model": "m", "prompt": "hi"}
_STREAM: Final = {"stream": True}
Case = tuple[str, dict[str, Any]]
OPENAI: Final[dict[str, Case]] = {
    "chat": ("/v1/chat/completions", {**_CHAT, "max_tokens": 7}),
    "chat without a limit": ("/v1/chat/completions", _CHAT),
    "chat, streamed": (
        "/v1/chat/completions", {**_CHAT, **_STREAM, "stream_options": {"include_usage": True}}
    ),
    "chat, n = 2": ("/v1/chat/completions", {**_CHAT, "n": 2}),
    "chat, max_completion_tokens": ("/v1/chat/completions", {**_CHAT, "max_completion_tokens": 9}),
    "completion": ("/v1/completions", {**_COMPLETION, "max_tokens": 7}),
    "completion, streamed": ("/v1/completions", {**_COMPLETION, **_STREAM}),
    "completions, a batch": ("/v1/completions", {**_COMPLETION, "prompt": ["hi", "ho"]}),
}  # fmt: skip
GENERATE: Final[dict[str, Case]] = {
    "generate": ("/generate", {"text": "hi"}),
    "generate, streamed": ("/generate", {"text": "hi", **_STREAM}),
    "generate, log probabilities": ("/generate", {"text": "hi", "return_logprob": True}),
    "generate, a batch": ("/generate", {"input_ids": [[1, 2], [3]]}),
    "generate, one prompt of ids": ("/generate", {"input_ids": [1, 2]}),
}
RESPONSES: Final[dict[str, Case]] = {
    "response": ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 7}),
}
CASES: Final[dict[str, dict[str, Case]]] = {
    "sglang": {**OPENAI, **GENERATE},
    "nixl": {**OPENAI, **RESPONSES},
    "mooncake": {**OPENAI, **RESPONSES},
}
Legs = dict[str, dict[str, Any]]  # by role: the keys of its body


class Engine(ThreadingHTTPServer):
    """An engine that records requests: `bodies` are those for generation, `raw` their bytes."""

    daemon_threads = True

    def __init__(self, role: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.role = role
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        reported = {"0": {"engine_id": "engine"}} if self.path == "/query" else {}
        self._answer(json.dumps(reported).encode())

    def do_POST(self) -> None:
        self.server.raw.append(self.rfile.read(int(self.headers["content-length"])))
        body = json.loads(self.server.raw[-1])
        self.server.bodies.append(body)
        if body.get("stream"):
            self._answer(b"data: [DONE]\n\n", "text/event-stream")
            return
        reply: dict[str, Any] = {
            "id": "a", "object": "x", "created": 1, "model": "m", "choices": [], "text": "a",
            "meta_info": {"id": "a", "input_token_logprobs": [[-0.5, 1, None]]},
        }  # fmt: skip
        if self.server.role == "prefill":
            reply["kv_transfer_params"] = {"remote_block_ids": [[1, 2]], "odd": "kept"}
        is_batch = isinstance(body.get("bootstrap_room"), list) and self.path == "/generate"
        self._answer(json.dumps([reply, reply] if is_batch else reply).encode())

    def _answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Write no log."""


@contextmanager
def engines() -> Iterator[dict[str, Engine]]:
    """One engine of each role."""
    made = {role: Engine(role) for role in ("prefill", "decode")}
    for engine in made.values():
        threading.Thread(target=engine.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        for engine in made.values():
            engine.shutdown()
            engine.server_close()


def record(url: str, connector: str, both: Mapping[str, Engine]) -> dict[str, Legs]:
    """Send all requests of a protocol to the router at `url`; return those of each leg."""
    found = {}
    for name, (path, body) in CASES[connector].items():
        for engine in both.values():
            engine.bodies.clear()
        status = post(url + path, body)
        await_both(both)
        legs = {role: _kept(engine.bodies[-1]) for role, engine in both.items() if engine.bodies}
        if status != 200 or len(legs) < len(both):
            raise RuntimeError(f"{connector}, {name}: status {status}, legs {sorted(legs)}")
        found[name] = _named(legs, both)
    return found


def await_both(both: Mapping[str, Engine]) -> None:
    """Wait for both legs: prefill's may arrive after the answer, as the engines are independent."""
    ends_at = time.monotonic() + LATE_SECS
    while not all(engine.bodies for engine in both.values()) and time.monotonic() < ends_at:
        threading.Event().wait(0.005)


def post(url: str, body: object) -> int:
    data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    asked = urllib.request.Request(url, data, kind)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0


def _kept(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: body[key] for key in KEYS if body.get(key) is not None}


def _named(legs: Legs, both: Mapping[str, Engine]) -> Legs:
    """Replace values that differ between runs by names. Rooms and ids are numbered by value."""
    rooms: dict[Any, str] = {}

    def room(value: Any) -> Any:
        if isinstance(value, list):
            return [room(each) for each in value]
        return rooms.setdefault(value, f"room {len(rooms)}")

    def port(value: Any) -> Any:
        if isinstance(value, list):
            return [port(each) for each in value]
        return "PORT" if value == both["prefill"].port else value

    for leg in legs.values():
        if "bootstrap_room" in leg:
            leg["bootstrap_room"] = room(leg["bootstrap_room"])
            leg["bootstrap_port"] = port(leg["bootstrap_port"])
        params = leg.get("kv_transfer_params", {})
        if "transfer_id" in params:
            params["transfer_id"] = room(params["transfer_id"])
        if "remote_bootstrap_addr" in params:
            address = params["remote_bootstrap_addr"]
            params["remote_bootstrap_addr"] = address.replace(str(both["prefill"].port), "PORT")
    return legs


def record_peer(connector: str, program: Sequence[str]) -> dict[str, Legs]:
    """Start a peer's router in front of two engines. Raises RuntimeError."""
    with ExitStack() as stack:
        both = stack.enter_context(engines())
        prefill, decode, port = both["prefill"], both["decode"], free_port()
        words = ["--pd-disaggregation"]
        if connector != "sglang":
            words = ["--vllm-pd-disaggregation", "--kv-connector", connector]
        words += ["--prefill", prefill.url, str(prefill.port), "--decode", decode.url]
        words += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        process = stack.enter_context(running([*program, *words], subprocess.DEVNULL))
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        return record(url, connector, both)


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until a chat is answered. Raises RuntimeError."""
    give_up_at = time.monotonic() + READY_SECS
    while post(f"{url}/v1/chat/completions", _CHAT) != 200:
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"{process.args!r} did not answer, status {process.poll()}")
        time.sleep(0.1)  # noqa: TID251  no event loop runs here


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.record_legs", description=__doc__)
    parser.add_argument("--sglang-router", metavar="PYTHON")
    parser.add_argument("--vllm-router", metavar="PROGRAM")
    arguments = parser.parse_args()
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if arguments.sglang_router:
        program = [arguments.sglang_router, "-m", "sglang_router.launch_router"]
        kept["sglang"] = record_peer("sglang", program)
    if arguments.vllm_router:
        for connector in ("nixl", "mooncake"):
            kept[connector] = record_peer(connector, [arguments.vllm_router])
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
