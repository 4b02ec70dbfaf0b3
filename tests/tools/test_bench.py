"""The bench's worker and load generator, against each other and against wrong responses."""

import json
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.bench.data_plane import hand_driven, instructions, profile
from tools.bench.harness import load_run as legs
from tools.bench.harness import proxies, report
from tools.bench.harness.build import BuildError, build, compiler

needs_cc = pytest.mark.skipif(compiler() is None, reason="no C compiler (cc, gcc or $CC)")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def workers() -> Iterator[list[int]]:
    with legs.fake_worker() as ports:
        yield ports


@contextmanager
def server_that_responds(response: bytes) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(response)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


@contextmanager
def server_that_collects(values: list[bytes]) -> Iterator[int]:
    """Collects the trace ids of one connection's requests, and echoes each request's body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client, client.makefile("rb") as stream:
                while line := stream.readline():
                    name, _, value = line.rstrip().partition(b": ")
                    if name == b"x-amzn-trace-id":
                        values.append(value)
                    elif name == b"content-length":
                        size = int(value)
                    elif not name:
                        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
                        client.sendall(head + stream.read(size))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


def load(*arguments: object) -> dict[str, object]:
    argv = [str(build("load_generator")), *map(str, arguments)]
    stdout = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60).stdout
    first, second, last = stdout.splitlines()
    assert (first, second) == ("window_opened", "window_closed")
    return dict(json.loads(last))


@needs_cc
def test_every_request_of_a_bounded_load_gets_its_own_response(workers: list[int]) -> None:
    result = load("unary", workers[0], 4, 0, 20_000, 1_200)
    assert (result["errors"], result["responses"], result["units"]) == (0, 1_200, 1_200)
    assert result["reconnects"] == 0


@needs_cc
def test_a_header_field_can_be_new_in_every_request() -> None:
    values: list[bytes] = []
    with server_that_collects(values) as port:
        assert load("unique", port, 1, 0, 20_000, 600)["errors"] == 0
    assert len(values) == len(set(values)) == 600
    assert {len(value) for value in values} == {len(values[0])}


@needs_cc
def test_every_stream_is_complete_with_all_its_events(workers: list[int]) -> None:
    result = load("stream", workers[-1], 7, 0, 300, 20)
    assert (result["errors"], result["responses"]) == (0, 7)
    assert result["units"]


@needs_cc
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}", "the status is not 200"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "the response to another request"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "the connection ended too early"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "invalid bytes instead of a response"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}{}",
            "invalid bytes instead of a response",
        ),
    ],
)
def test_a_wrong_response_is_an_error_with_its_reason(response: bytes, reason: str) -> None:
    with server_that_responds(response) as port:
        result = load("unary", port, 1, 0, 5_000, 1)
    assert (result["errors"], result["responses"]) == (1, 0)
    assert str(result["first_error"]).startswith(reason)


@needs_cc
@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        (b"0\r\n\r\n", "events are missing"),
        (b"e\r\ndata: [DONE]\n\n\r\n", "the connection ended too early"),
        (b'16\r\ndata: {"seq":1,"t":1\n\n\r\n', "an event that is not the next one"),
        (b"zz\r\n", "invalid bytes instead of a response"),
    ],
)
def test_a_stream_that_is_truncated_or_out_of_order_is_an_error(chunks: bytes, reason: str) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with server_that_responds(head + chunks) as port:
        result = load("stream", port, 1, 0, 300, 100)
    assert result["responses"] == 0
    assert str(result["first_error"]).startswith(reason)


@needs_cc
def test_a_leg_without_a_proxy_has_latency_but_no_cost(workers: list[int]) -> None:
    leg = legs.run_leg(proxies.NOTHING, legs.Load("few", "unary", 2), workers, 0.1)
    assert (leg.errors, leg.cpu_us) == (0, None)
    assert leg.units


@needs_cc
def test_a_load_beyond_its_bounds_is_refused() -> None:
    argv = [str(build("load_generator")), "unary", "1", "20000", "0", "100"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "at most 16384 connections" in result.stderr


def test_the_stderr_of_a_proxy_that_cannot_start_is_quoted() -> None:
    failing = shlex.join([sys.executable, "-c", "raise SystemExit('no such key: server.prot')"])
    with (
        pytest.raises(legs.LegError, match=r"ended with status 1(.|\n)*no such key: server.prot"),
        legs.started(proxies.proxy(failing + " {port}", "broken"), [1]),
    ):
        pass


def test_a_proxy_command_gets_its_port_and_each_worker_as_an_argument(tmp_path: Path) -> None:
    side = proxies.proxy("router --port {port} --worker-urls {worker_urls}", "router")
    assert side.command is not None
    assert side.command(proxies.Place(7, [8, 9], tmp_path)) == [
        *("router", "--port", "7", "--worker-urls"),
        *("http://127.0.0.1:8", "http://127.0.0.1:9"),
    ]
    with pytest.raises(ValueError, match="to determine its address"):
        proxies.proxy("router --port 8000", "router")


def test_without_a_compiler_the_message_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="apt install gcc"):
        build("load_generator")


def leg_of(side: str, cpu_us: float | None) -> legs.Leg:
    return legs.Leg("unary c=1", side, cpu_us, 15.0, 10, 10.0, 1.0, 1.0, 2.0, 0.0, 0, "")


def test_ratios_are_taken_within_a_round_not_between_medians() -> None:
    costs = [(10.0, 20.0), (40.0, 40.0), (20.0, 60.0)]
    rounds = [
        {"peer": leg_of("peer", peer_cost), "ours": leg_of("ours", our_cost)}
        for peer_cost, our_cost in costs
    ]
    assert report.ratios(rounds, "ours", "peer") == [2.0, 1.0, 3.0]
    assert "2.00 (1.00..3.00)" in report.cpu_table({"unary c=1": rounds}, "ours", ["peer"])[1]


def test_without_a_peer_there_is_a_cost_but_no_ratio() -> None:
    rounds = [{"ours": leg_of("ours", 30.0), "bare": leg_of("bare", None)}]
    assert report.ratios(rounds, "ours", "peer") == []
    assert report.cpu_table({"unary c=1": rounds}, "ours")[1].split() == [
        *("unary", "c=1", "30.0", "(30.0..30.0)")
    ]


def test_folded_stacks_of_main_threads_become_shares_of_lines_and_functions() -> None:
    main_thread = "thread (7): MainThread;main (a.py:1);run (a.py:5)"
    other = "thread (8): watcher;sleep"
    assert profile.table(f"{main_thread};recv (b.py:7) 3\n{main_thread} 1\n{other} 9\n") == [
        "4 samples",
        "in this line itself",
        "  75.0%  recv (b.py:7)",
        "  25.0%  run (a.py:5)",
        "in this function and what it calls",
        " 100.0%  main (a.py)",
        " 100.0%  run (a.py)",
        "  75.0%  recv (b.py)",
    ]


def test_instructions_are_the_last_total_of_a_dump():
    assert instructions.total_of("events: Ir\nfn=(1)\n16 1200\ntotals: 81200\n") == 81200
    assert instructions.total_of("events: Ir\n") == 0


@pytest.mark.parametrize("mode", instructions.MODES)
def test_the_driven_data_plane_serves_every_client_in_every_round(mode):
    assert hand_driven.drive(mode, 2) == 2 * hand_driven.CLIENTS
