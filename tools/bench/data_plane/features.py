"""The cost of features that affect every request: the proxy with and without each.

Features: metrics, keys of callers, traces; aliases, ranks, keys of workers. The load is small POSTs
of 32 clients; the sides of a round run within seconds of each other. Sampled spans are sent to a
collector that discards them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from tools.bench.harness.load_run import KEY
from tools.bench.harness.proxies import Side, reconfigured

LIMITS = {"max_inflight": 10**6, "requests_per_minute": 10**9, "tokens_per_minute": 10**12}
WORKER_KEY = "OMNI_PROXY_BENCH_KEY"
PLAIN = "metrics, no keys, no traces"


def _key(limits: int) -> str:
    """A key with the first `limits` of LIMITS, all above the possible load."""
    lines = [f"{name} = {limit}\n" for name, limit in list(LIMITS.items())[:limits]]
    digest = sha256(KEY.encode()).hexdigest()
    return f'[[keys]]\nname = "bench"\nkey_sha256 = "{digest}"\n{"".join(lines)}'


def _server(line: str) -> Callable[[str], str]:
    return lambda text: text.replace("[server]\n", f"[server]\n{line}\n", 1)


def _table(lines: str) -> Callable[[str], str]:
    return lambda text: f"{text}{lines}"


def _traces(endpoint: str, share: float) -> Callable[[str], str]:
    return _table(f'[observe]\notlp_endpoint = "{endpoint}"\ntrace_sampling = {share}\n')


def sides(ours: Side, collector: str) -> list[Side]:
    """The sides to compare, the plain one first; `collector` is the collector's URL."""
    changes: dict[str, Callable[[str], str]] = {
        PLAIN: str,
        "no metrics": _server("metrics = false"),
        "[server] api_key": _server(f'api_key = "{KEY}"'),
        "a key": _table(_key(0)),
        "a key, max_inflight": _table(_key(1)),
        "... requests_per_minute": _table(_key(2)),
        "... tokens_per_minute": _table(_key(3)),
        "traces, none sampled": _traces(collector, 0.0),
        "traces, 1 % sampled": _traces(collector, 0.01),
        "traces, all sampled": _traces(collector, 1.0),
    }
    return [reconfigured(ours, name, change) for name, change in changes.items()]


def fleet_sides(ours: Side) -> list[Side]:
    """Sides with aliases, ranks and keys of workers; the load's model is `bench`."""
    os.environ[WORKER_KEY] = "secret"

    def workers(line: str, count: int = -1) -> Callable[[str], str]:
        return lambda text: text.replace("[[workers]]\n", f"[[workers]]\n{line}\n", count)

    changes: dict[str, Callable[[str], str]] = {
        "plain workers": str,
        "an alias of another name": _table(_alias("other")),
        "ranks at one worker of eight": workers("ranks = 2", 1),
        "ranks at all workers": workers("ranks = 2"),
        "both": lambda text: workers("ranks = 2")(text) + _alias("other"),
        "the model is an alias": _table(_alias("bench")),
        "api_key_env at all workers": workers(f'api_key_env = "{WORKER_KEY}"'),
    }
    return [reconfigured(ours, name, change) for name, change in changes.items()]


def _alias(name: str) -> str:
    return f'[[routing.models]]\nname = "{name}"\ntargets = [{{ model = "bench" }}]\n'


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_collector() -> Iterator[str]:
    """Start a collector; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
