"""Reading traces: both formats, also compressed, and errors that name the line."""

import gzip
import json

import pytest

from omni_proxy.simulate.traces import TraceError, read_route_log, read_trace

MOONCAKE = [
    {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3500, "input_length": 512, "output_length": 0, "hash_ids": [0]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def route_log_record(**fields):
    return {
        "timestamp": "2026-01-01T00:00:10+00:00", "duration_s": 4.0, "request_bytes": 4000,
        "response_bytes": 2400, "stream": True, "completed": True, "status_code": 200,
        "model": "m", "traffic": "generation", "event": "stream_complete", **fields,
    }  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True])
def test_a_mooncake_trace_is_read(tmp_path, compressed):
    path = tmp_path / ("trace.jsonl.gz" if compressed else "trace.jsonl")
    text = lines(MOONCAKE).encode()
    path.write_bytes(gzip.compress(text) if compressed else text)
    first, second = read_trace(path).requests
    assert (first.at, first.input_tokens, first.output_tokens, first.blocks) == (
        0.0,
        600,
        5,
        (0, 1),
    )
    assert (second.at, second.output_tokens, second.blocks) == (2.5, 1, (0,))


def test_an_azure_trace_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path).requests
    assert (first.at, first.input_tokens, first.output_tokens, first.blocks) == (0.0, 374, 44, ())
    assert second.at == pytest.approx(4.314579)


def test_reading_is_limited_to_the_first_requests(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    (request,) = read_trace(path, 1).requests
    assert (request.input_tokens, request.output_tokens) == (374, 44)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("t.jsonl", lines(MOONCAKE[:1]) + "{oops\n", ":2: "),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}\n', ":1: "),
        ("t.jsonl", lines([MOONCAKE[0] | {"input_length": -1}]), ":1: input_length is -1"),
        ("t.jsonl", lines([MOONCAKE[0] | {"hash_ids": [1]}]), ":1: 1 hash_ids for 600 tokens"),
        ("t.jsonl", "\n\n", ":1: the file has no requests"),
        ("t.csv", "a,b\n", ":1: expected the header"),
        ("t.csv", AZURE + "2023-11-16 18:15:50,many,1\n", ":4: "),
        ("t.csv", AZURE + "2023-11-16 18:15:50,1\n", ":4: expected 3 fields, found 2"),
        ("t.csv", AZURE + "yesterday,1,1\n", ":4: "),
        ("t.txt", "", "expected a name that ends with"),
    ],
)
def test_an_error_names_the_file_and_the_line(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path))
    assert expected in str(error.value)


def test_a_missing_or_incomplete_file_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")
    incomplete = tmp_path / "cut.jsonl.gz"
    incomplete.write_bytes(gzip.compress(lines(MOONCAKE).encode())[:-12])
    with pytest.raises(TraceError, match="incomplete"):
        read_trace(incomplete)


def test_a_route_log_gives_its_completed_generation_requests(tmp_path):
    path = tmp_path / "route.log"
    path.write_text(
        lines(
            [
                route_log_record(),
                route_log_record(
                    timestamp="2026-01-01T00:00:07+00:00", duration_s=0.5, stream=False
                ),
                route_log_record(completed=False),
                route_log_record(status_code=503),
                route_log_record(traffic="speech_http"),
            ]
        )
    )
    first, second = read_route_log(path).requests
    assert (first.at, first.input_tokens, first.output_tokens, first.model) == (0.0, 1000, 10, "m")
    assert (second.at, second.output_tokens) == (0.5, 600)


def test_a_damaged_file_or_times_in_another_unit_are_refused(tmp_path):
    compressed = bytearray(gzip.compress(lines(MOONCAKE * 20).encode()))
    compressed[20:24] = b"\xff" * 4
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(compressed)
    with pytest.raises(TraceError, match="the compressed file is damaged"):
        read_trace(damaged)
    wrong_unit = tmp_path / "unit.jsonl"
    wrong_unit.write_text(lines([MOONCAKE[0], MOONCAKE[1] | {"timestamp": 1e15}]))
    with pytest.raises(TraceError, match=r"unit\.jsonl:2: .* is in milliseconds"):
        read_trace(wrong_unit)
