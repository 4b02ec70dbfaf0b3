import json
import logging
import sys

import pytest

from omni_proxy.telemetry.logs import configure

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def test_text_lines_have_level_and_logger(capsys, monkeypatch):
    configure("info", "text")
    logging.getLogger("omni_proxy.dataplane").info("hello %s", "world")
    logging.getLogger("omni_proxy.dataplane").debug("not told")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO    omni_proxy.dataplane: hello world")


def test_json_lines_are_one_object_each_even_with_a_traceback(capsys):
    configure("debug", "json")
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        logging.getLogger("omni_proxy.server").exception("failed")
    told = json.loads(capsys.readouterr().err)
    assert (told["level"], told["logger"], told["message"]) == (
        "error",
        "omni_proxy.server",
        "failed",
    )
    assert "two\nlines" in told["traceback"]


def test_it_may_be_called_again_and_leaves_one_writer(capsys):
    before = len(logging.getLogger().handlers)
    configure("info", "text")
    configure("warning", "json")
    assert len(logging.getLogger().handlers) == before + 1
    logging.getLogger("omni_proxy").info("hidden")
    logging.getLogger("omni_proxy").warning("shown")
    assert json.loads(capsys.readouterr().err)["message"] == "shown"


def test_probes_do_not_fill_the_log(capsys):
    configure("info", "text")
    logging.getLogger("httpx").info("HTTP Request: GET /health")
    assert capsys.readouterr().err == ""


def test_it_writes_to_stderr(capsys):
    configure("info", "text")
    logging.getLogger("omni_proxy").info("x")
    assert capsys.readouterr().out == ""
    assert sys.stderr is not None


@pytest.mark.parametrize("format_", ["text", "json"])
def test_a_line_holds_no_secret_of_a_query_and_nothing_that_a_terminal_obeys(capsys, format_):
    configure("info", format_)
    logging.getLogger("omni_proxy").error("GET http://w/a?api%%5Fkey=%s\x9b\u202e failed", "abc")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "GET http://w/a?api%5Fkey=*** failed" in line


class Lines:
    """What a LineLog is to the log."""

    def __init__(self):
        self.on, self.kept = True, []

    def write(self, record):
        self.kept.append(record.decode())


def test_a_file_gets_the_same_lines_from_when_it_is_named_on(capsys):
    lines = Lines()
    configure("info", "text")
    logging.getLogger("omni_proxy").info("early")
    configure("info", "text", lines)
    configure("info", "text", lines)
    logging.getLogger("omni_proxy").info("key=%s", "url?api_key=abc")
    (line,) = lines.kept
    assert line.endswith("INFO    omni_proxy: key=url?api_key=***")
    assert capsys.readouterr().err.splitlines()[1] == line
    configure("info", "json")
    logging.getLogger("omni_proxy").info("as json")
    assert json.loads(lines.kept[1])["message"] == "as json"
    lines.on = False
    logging.getLogger("omni_proxy").info("only here")
    assert len(lines.kept) == 2


def test_a_file_that_cannot_be_written_is_not_reported_of_itself():
    lines = Lines()
    configure("info", "text", lines)
    logging.getLogger("omni_proxy.telemetry.line_log").warning("cannot write")
    assert lines.kept == []
