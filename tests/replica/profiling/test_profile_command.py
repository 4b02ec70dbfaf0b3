import json

import pytest

from omni_proxy.replica.profiling.recorder import EventRecorder
from omni_proxy.replica.profiling.report import main


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
    told = capsys.readouterr().out
    assert told.startswith("# Requests: 2\n\n## Stage breakdown\n")
    assert "<decode>" in told


def test_json_goes_to_a_file(source, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([str(source.parent), "--format", "json", "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    assert (made["request_count"], len(made["timelines"]["r2"])) == (2, 4)
    assert out.read_text().startswith('{\n  "timelines"')
    assert "2 requests written" in capsys.readouterr().err


def test_the_page_stands_alone_and_escapes_what_events_say(source, capsys):
    assert main([str(source), "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "r&amp;1" in page
    assert "&lt;decode&gt;" in page
    assert "<decode>" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('class="lane"') == 2


def test_a_missing_source_is_reported_and_still_a_report(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 0
    captured = capsys.readouterr()
    assert "# Requests: 0" in captured.out
    assert "no such file" in captured.err


def test_an_output_that_cannot_be_written_is_an_error(source, tmp_path, capsys):
    assert main([str(source), "--out", str(tmp_path / "no" / "where")]) == 1
    assert "cannot write" in capsys.readouterr().err
