"""`omni-proxy bench` against a server on a real socket."""

import json
import os
import signal
import threading
from functools import partial

import pytest

from omni_proxy.cli import main
from tests.http_server import Quiet, served

WAIT_SECS = 20


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def stream(words=3, prompt_tokens=10):
    """A streamed chat response, split into pieces that do not match its events."""
    raw = b": keep-alive\n\n" + event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    for _ in range(words):
        raw += event(choices=[{"delta": {"content": "w "}}])
    raw += event(choices=[{"delta": {}, "finish_reason": "length"}])
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": words}
    raw += event(choices=[], usage=usage) + b"data: [DONE]\n\n"
    return [raw[start : start + 50] for start in range(0, len(raw), 50)]


@pytest.fixture
def engine():
    """A fake engine. `answer(number)` returns status and pieces; a callable piece is called."""

    class Engine(Quiet):
        requests, answer, lock = [], None, threading.Lock()

        def do_GET(self):
            self.reply(200, [json.dumps({"data": [{"id": "tiny"}]}).encode()])

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with self.lock:
                self.requests.append((self.path, body, self.headers.get("authorization")))
                number = len(self.requests)
            self.reply(*Engine.answer(number))

        def reply(self, status, pieces):
            self.send_response(status)
            self.send_header("content-type", "text/event-stream" if status == 200 else "text/plain")
            self.end_headers()
            for piece in pieces:
                if callable(piece):
                    piece()
                else:
                    self.wfile.write(piece)
                    self.wfile.flush()

    Engine.answer = lambda number: (200, stream())
    with served(Engine) as Engine.url:
        yield Engine


def run_bench(capsys, *args):
    status = main(["bench", *args, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


QUICK = ("--workload", "uniform", "--requests", "10", "--concurrency", "4", "--max-tokens", "3")


def test_known_responses_give_known_counts(engine, capsys):
    truncated = stream()[:3]
    failures = {2: (503, [b"busy"]), 5: (503, [b"busy"]), 7: (200, truncated)}
    engine.answer = lambda number: failures.get(number, (200, stream()))
    status, result, err = run_bench(capsys, f"{engine.url}/v1/", *QUICK, "--deadline-ms", "60000")
    assert status == 0
    assert "sending 10 requests to" in err
    assert (result["url"], result["model"]) == (engine.url, "tiny")
    assert (result["requests"], result["completed"], result["failed"]) == (10, 7, 3)
    assert result["errors"] == {"status 503": 2, "stream": 1}
    assert result["error_examples"]["status 503"] == "busy"
    assert (result["input_tokens"], result["output_tokens"]) == (70, 21)
    assert result["goodput"]["share"] == 0.7
    assert result["total_ms"]["p99"] >= result["first_token_ms"]["p50"] > 0
    for path, body, key in engine.requests:
        assert (path, key) == ("/v1/chat/completions", None)
        assert (body["model"], body["stream"]) == ("tiny", True)
        assert body["stream_options"] == {"include_usage": True}
        assert body["max_tokens"] <= 3


def test_the_next_turn_of_a_chat_has_the_response_to_the_previous_one(engine, capsys):
    status, result, _ = run_bench(
        capsys, engine.url, "--workload", "chats", "--requests", "6", "--concurrency", "1"
    )
    assert (status, result["completed"]) == (0, 6)
    chats = [body["messages"] for _, body, _ in engine.requests]
    later = [chat for chat in chats if len(chat) > 1]
    assert later
    for chat in later:
        assert chat[-2] == {"role": "assistant", "content": "w w w "}
        assert chat[:-2] in chats


def test_a_trace_is_replayed_at_its_times_with_a_key(engine, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_KEY", "hush")
    trace = tmp_path / "short.csv"
    lines = [f"2024-05-10 00:00:0{second}.0,{20 + second},5" for second in range(3)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    engine.answer = lambda number: (200, [event(choices=[{"text": "a", "finish_reason": "stop"}])])
    status, result, _ = run_bench(
        capsys, engine.url, "--trace", str(trace), "--speed", "100", "--concurrency", "1",
        "--endpoint", "completions", "--api-key-env", "BENCH_KEY", "--model", "other",
    )  # fmt: skip
    assert (status, result["completed"], result["without_usage"]) == (0, 3, 3)
    assert [len(body["prompt"].split()) for _, body, _ in engine.requests] == [20, 21, 22]
    assert {(path, key) for path, _, key in engine.requests} == {("/v1/completions", "Bearer hush")}
    assert {body["model"] for _, body, _ in engine.requests} == {"other"}


def test_a_route_log_is_replayed_at_its_times(engine, capsys, tmp_path):
    log = tmp_path / "route.log"
    lines = [
        {"timestamp": f"2026-01-01T00:00:0{second}+00:00", "traffic": "generation", "stream": True,
         "completed": True, "status_code": 200, "duration_s": 0.5, "request_bytes": 80 + 4 * second,
         "response_bytes": 480}
        for second in range(3)
    ]  # fmt: skip
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, result, _ = run_bench(capsys, engine.url, "--route-log", str(log), "--speed", "100")
    assert (status, result["completed"], result["source"]) == (0, 3, str(log))
    prompts = [body["messages"][0]["content"].split() for _, body, _ in engine.requests]
    assert sorted(map(len, prompts)) == [20, 21, 22]
    assert {body["max_tokens"] for _, body, _ in engine.requests} == {2}


def test_a_first_token_after_the_deadline_is_no_goodput(engine, capsys):
    engine.answer = lambda number: (200, [partial(threading.Event().wait, 0.02), *stream()])
    status, result, _ = run_bench(capsys, engine.url, *QUICK, "--deadline-ms", "10")
    assert (status, result["completed"]) == (0, 10)
    assert result["goodput"] == {"deadline_ms": 10, "share": 0, "requests_per_sec": 0}


def test_a_response_that_does_not_end_is_a_timeout(engine, capsys):
    release = threading.Event()
    hold = partial(release.wait, WAIT_SECS)
    engine.answer = lambda number: (200, [*stream()[:3], hold])
    try:
        status, result, _ = run_bench(capsys, engine.url, *QUICK, "--timeout-secs", "0.05")
    finally:
        release.set()
    assert (status, result["errors"]) == (1, {"timeout": 10})
    assert result["total_ms"] is None


def test_ctrl_c_prints_the_results_so_far(engine, capsys):
    release = threading.Event()

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(WAIT_SECS)

    engine.answer = lambda number: (200, [interrupt] if number == 3 else stream())
    flags = ("--requests", "10", "--concurrency", "1")
    try:
        status, result, _ = run_bench(capsys, engine.url, "--workload", "uniform", *flags)
    finally:
        release.set()
    assert status == 130
    assert (result["interrupted"], result["completed"], result["unfinished"]) == (True, 2, 1)
    assert result["failed"] == 0


def test_the_status_is_1_and_the_table_has_the_reason_if_every_request_failed(engine, capsys):
    engine.answer = lambda number: (401, [b"no \x1b[31mkey"])
    assert main(["bench", engine.url, *QUICK]) == 1
    out = capsys.readouterr().out
    assert "0 of 10 requests completed" in out
    assert "10 failed: status 401: no \\x1b[31mkey" in out


def test_a_table_and_a_plot_are_written(engine, capsys, tmp_path):
    plot = tmp_path / "plot.svg"
    assert main(["bench", engine.url, *QUICK, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for name in ("time to first token", "time between tokens", "total time", "sent late", "p99"):
        assert name in out
    assert plot.read_text().startswith("<svg ")
    assert "Time to first token, ms" in plot.read_text()
    assert main(["bench", engine.url, *QUICK, "--plot", str(tmp_path / "no" / "x.svg")]) == 2
    captured = capsys.readouterr()
    assert "10 of 10 requests completed" in captured.out
    assert "--plot" in captured.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["http://127.0.0.1:1"], "can't be reached"),
        (["127.0.0.1:80"], "expected http://"),
        (["http://127.0.0.1:99999"], "port from 1"),
        (["http://a:b@127.0.0.1"], "--api-key-env"),
        (["http://127.0.0.1:1", "--api-key-env", "NO_SUCH_NAME_HERE"], "holds no key"),
        (["http://127.0.0.1:1", "--trace", "/no/such.csv"], "such.csv"),
        (["http://127.0.0.1:1", "--ca", "/no/such.pem"], "--ca"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused_with_a_reason(capsys, flags, reason):
    assert main(["bench", *flags]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trace", "x.csv", "--rate", "2"], "--speed scales"),
        (["--speed", "2"], "--speed is for --trace"),
        (["--route-log", "x", "--rate", "2"], "--speed scales"),
        (["--requests", "0"], "whole number"),
        (["--rate", "1e9"], "at most"),
    ],
)
def test_flags_that_do_not_go_together_are_a_usage_error(capsys, flags, reason):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "http://127.0.0.1:1", *flags])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
