import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.instrumentation import EventRecorder
from omni_proxy.replica.profile_report import (
    PAIRS,
    build_report,
    hop_rows,
    intervals,
    main,
    read_events,
    render_table,
    stage_rows,
    timelines,
)

MS = 1_000_000


def event(name, at_ms, request="r", stage="s", **metadata):
    return {
        "request_id": request, "stage": stage, "event_name": name, "timestamp_ns": int(at_ms * MS),
        "run_id": "x", "pid": 1, "metadata": metadata,
    }  # fmt: skip


def test_an_interval_is_between_two_events_of_one_request_in_one_stage():
    events = [
        event("stage_input_received", 0),
        event("stage_input_received", 1, stage="other"),
        event("stage_input_received", 2, request="q"),
        event("stage_complete", 5),
    ]
    assert list(intervals(events)) == [
        ("r", "s", "stage_input_received->stage_complete", 0, 5 * MS)
    ]


def test_the_interval_that_opened_first_is_closed_first():
    events = [
        event("encoder_start", 0), event("encoder_start", 2),
        event("encoder_end", 3), event("encoder_end", 10),
    ]  # fmt: skip
    assert [(o // MS, c // MS) for *_, o, c in intervals(events)] == [(0, 3), (2, 10)]


def test_one_event_may_open_several_intervals():
    events = [
        event("scheduler_prefill_start", 0), event("scheduler_first_emit", 3),
        event("scheduler_prefill_end", 4),
    ]  # fmt: skip
    assert {name.split("->")[1] for _, _, name, *_ in intervals(events)} == {
        "scheduler_first_emit", "scheduler_prefill_end",
    }  # fmt: skip


def test_a_closing_event_without_an_opening_one_is_ignored():
    assert list(intervals([event("stage_complete", 1), event("stage_input_received", 2)])) == []


def test_rows_have_the_statistics_and_are_sorted_by_their_total():
    events = []
    for number, ms in enumerate((10, 20, 30, 40)):
        events += [
            event("stage_input_received", 0, request=str(number)),
            event("stage_complete", ms, request=str(number)),
        ]
    events += [
        event("stage_input_received", 0, stage="a"), event("stage_complete", 500, stage="a"),
    ]  # fmt: skip
    first, second = stage_rows(events)
    assert first["stage"] == "a"
    assert second == {
        "stage": "s", "interval": "stage_input_received->stage_complete", "count": 4,
        "total_ms": 100.0, "avg_ms": 25.0, "p50_ms": 25.0, "p95_ms": 38.5, "max_ms": 40.0,
    }  # fmt: skip


def test_a_hop_pairs_what_one_stage_sent_and_another_received():
    events = [
        event("stage_hop_sent", 1, stage="a", to_stage="b", transport="local"),
        event("stage_input_received", 4, stage="b", from_stage="a", kind="payload"),
        event("stage_input_received", 5, stage="a", from_stage="coordinator", kind="submit"),
        event("stage_stream_chunk_sent", 6, stage="b", to_stage="coordinator", chunk_id=0),
        event("coordinator_stream_received", 8, stage="coordinator", from_stage="b", chunk_id=0),
    ]
    assert [(r["src"], r["dst"], r["kind"], r["total_ms"]) for r in hop_rows(events)] == [
        ("a", "b", "payload", 3.0), ("b", "coordinator", "stream_chunk", 2.0),
    ]  # fmt: skip


def test_chunks_are_matched_by_their_number():
    def chunk_sent(at_ms, number):
        return event("stage_stream_chunk_sent", at_ms, stage="a", to_stage="b", chunk_id=number)

    def chunk_received(at_ms, number):
        return event(
            "stage_stream_chunk_received", at_ms, stage="b", from_stage="a", chunk_id=number
        )

    (row,) = hop_rows(
        [chunk_sent(0, 0), chunk_sent(1, 1), chunk_received(5, 1), chunk_received(7, 0)]
    )
    assert (row["count"], row["total_ms"], row["max_ms"]) == (2, 11.0, 7.0)


def test_a_timeline_starts_at_the_first_event_of_the_request():
    by_request = timelines([event("a", 5), event("a", 7, request="q"), event("b", 8.25)])
    assert [e["t_rel_ms"] for e in by_request["r"]] == [0.0, 3.25]
    assert [e["t_rel_ms"] for e in by_request["q"]] == [0.0]


def test_the_keys_of_the_report_are_in_a_fixed_order():
    assert list(build_report([])) == [
        "timelines",
        "stage_breakdown",
        "hop_breakdown",
        "request_count",
    ]


def test_the_table_is_padded_to_its_columns():
    report = build_report([event("stage_input_received", 0), event("stage_complete", 5)])
    assert render_table(report).split("\n") == [
        "# Requests: 1",
        "",
        "## Stage breakdown",
        "stage | interval                             | count | total_ms | avg_ms | p95_ms",
        "------+--------------------------------------+-------+----------+--------+-------",
        "s     | stage_input_received->stage_complete | 1     | 5.0      | 5.0    | 5.0   ",
        "",
        "## Hop breakdown",
        "(empty)",
    ]


def test_lines_that_are_not_events_are_reported_and_skipped(tmp_path):
    valid = json.dumps(event("a", 1))
    no_time = json.dumps({**event("a", 1), "timestamp_ns": True})
    path = tmp_path / "events_s_1.jsonl"
    path.write_text(f"{valid}\n{{\n[]\n\n{no_time}\n{'[' * 100_000}\n")
    (tmp_path / "other.jsonl").write_text("junk\n")
    messages = []
    assert read_events(tmp_path, messages.append) == [json.loads(valid)]
    assert [message.split(": ")[0] for message in messages] == [f"{path}:{n}" for n in (2, 3, 5, 6)]


def test_a_source_that_does_not_exist_is_reported(tmp_path):
    messages = []
    assert read_events(tmp_path / "no", messages.append) == []
    assert "no such file" in messages[0]


NAMES = sorted({name for pair in PAIRS for name in pair})


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from("ab"), st.integers(0, 5))))
def test_the_number_of_intervals_equals_a_simple_count(steps):
    events = [event(n, i, request=str(r), stage=s) for i, (n, s, r) in enumerate(steps)]
    expected = 0
    for opens, closes in PAIRS:
        for key in {(e["request_id"], e["stage"]) for e in events}:
            open_count = 0
            for entry in events:
                if (entry["request_id"], entry["stage"]) == key:
                    if entry["event_name"] == closes and open_count:
                        open_count -= 1
                        expected += 1
                    open_count += entry["event_name"] == opens
    result = list(intervals(events))
    assert len(result) == expected
    assert all(opened <= closed for *_, opened, closed in result)


@pytest.fixture
def source(tmp_path):
    recorder = EventRecorder("<decode>")
    recorder.start("run", str(tmp_path / "events"))
    for request in ("r&1", "r2"):
        for name in ("stage_input_received", "scheduler_prefill_start", "scheduler_first_emit"):
            recorder.record(name, request, "<decode>", {"from_stage": "coordinator"})
        recorder.record("stage_complete", request, "<decode>")
    recorder.stop()
    (path,) = (tmp_path / "events").iterdir()
    return path


def test_a_file_is_reported_as_a_table(source, capsys):
    assert main([str(source)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("# Requests: 2\n\n## Stage breakdown\n")
    assert "<decode>" in output


def test_json_is_written_to_a_file(source, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([str(source.parent), "--format", "json", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["request_count"], len(report["timelines"]["r2"])) == (2, 4)
    assert out.read_text().startswith('{\n  "timelines"')
    assert "2 requests written" in capsys.readouterr().err


def test_the_page_is_self_contained_and_escapes_event_texts(source, capsys):
    assert main([str(source), "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "r&amp;1" in page
    assert "&lt;decode&gt;" in page
    assert "<decode>" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('class="stage-row"') == 2


def test_a_missing_source_is_reported_and_gives_an_empty_report(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 0
    captured = capsys.readouterr()
    assert "# Requests: 0" in captured.out
    assert "no such file" in captured.err


def test_an_output_that_cannot_be_written_is_an_error(source, tmp_path, capsys):
    assert main([str(source), "--out", str(tmp_path / "no" / "where")]) == 1
    assert "cannot write" in capsys.readouterr().err
