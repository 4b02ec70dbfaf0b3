import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cli import main
from omni_proxy.cli.logs import BLOCK_BYTES, Tail, pretty_line, raw_line
from omni_proxy.dataplane.exchange.access_log import access_record, access_text
from omni_proxy.dataplane.exchange.exchange import Exchange
from tests.cli.feeds import ODD

ACCESS = {
    "at": "2026-11-21T19:00:00.204+00:00", "method": "POST", "target": "/v1/chat/completions",
    "status": 200, "outcome": "completed", "ended_by": "", "phase": "relay", "stream": True,
    "worker": "http://a:1", "model": "m", "attempts": 2, "queue_ms": 12.0, "first_byte_ms": 118.2,
    "total_ms": 840.0, "request_id": "r-1",
}  # fmt: skip
ROUTE = {
    "timestamp": "2026-11-21T19:00:00+00:00", "path": "/generate", "status_code": 502,
    "worker_url": "http://a:1", "error_type": "connect_failure", "duration_s": 1.5, "attempt": 1,
    "completed": False, "client_disconnected": False, "event": "stream_error", "method": "POST",
}  # fmt: skip


def line(record):
    return json.dumps(record).encode()


def test_an_access_record_is_one_short_line():
    clock, _, rest = pretty_line(line(ACCESS)).partition("  ")
    assert clock.endswith(":00.204")
    assert rest == (
        "200   840 ms  POST /v1/chat/completions  a:1  completed  first 118 ms  queued 12 ms  "
        "model m  2 attempts  id r-1"
    )


def test_a_text_line_is_shown_like_its_record():
    text = access_text(line(ACCESS | {"client": "10.0.0.9:5", "tried": []}))
    assert text.startswith(b"2026-11-21T19:00:00.204+00:00 10.0.0.9:5 POST /v1/")
    assert pretty_line(text) == pretty_line(line(ACCESS))
    short = b"2026-11-21T19:00:00.204+00:00 unix GET /live 200 completed"
    assert pretty_line(short).endswith("200        -  GET /live  -  completed")


@pytest.mark.parametrize(
    "model",
    [
        "a b",
        "m worker=http://evil:1",
        "m total_ms=1",
        r"m\x20n",
        "m\\",
        "a\u3000b\u00a0c",
        "=",
        "m=1",
    ],
)
def test_a_model_name_with_any_characters_stays_one_field(model):
    record = ACCESS | {"client": "c:1", "tried": [], "model": model}
    text = access_text(line(record))
    plain = access_text(line(record | {"model": "m"}))
    fields = [field.partition(b"=")[0] for field in text.split(b" ")]
    assert fields == [field.partition(b"=")[0] for field in plain.split(b" ")]
    assert pretty_line(text) == pretty_line(line(record))


def test_an_older_line_with_a_space_in_a_name_is_shown_unchanged():
    text = access_text(line(ACCESS | {"client": "c:1", "tried": []}))
    text = text.replace(b"model=m", b"model=m worker=http://evil:1")
    assert pretty_line(text) == text.decode()


def test_a_model_name_of_digits_stays_a_name():
    text = access_text(line(ACCESS | {"client": "c:1", "tried": [], "model": "007"}))
    assert "model 007" in pretty_line(text)


@pytest.mark.parametrize("format_line", [pretty_line, raw_line])
def test_a_key_that_an_older_version_wrote_is_not_shown(format_line):
    shown = format_line(line(ACCESS | {"target": "/workers?api%5Fkey=SECRET&x=1"}))
    assert "/workers?api%5Fkey=***&x=1" in shown
    text = format_line(b"2026-11-21T19:00:00.204+00:00 unix GET /live?token=SECRET 200 completed")
    assert "/live?token=***" in text


def test_a_route_record_is_shown_in_the_same_format():
    assert pretty_line(line(ROUTE)).partition("  ")[2] == (
        "502    1.5 s  POST /generate  a:1  stream_error  error connect_failure"
    )


def test_a_record_that_the_proxy_writes_is_shown():
    shown = pretty_line(access_record(Exchange(1.0, "10.0.0.9:5"), None))
    assert "cut_by_proxy" in shown


@given(st.one_of(st.binary(max_size=60), ODD.map(str.encode)))
def test_any_other_line_is_shown_printable(raw):
    assert pretty_line(raw).isprintable()


@given(
    st.dictionaries(
        st.sampled_from((*ACCESS, *ROUTE)),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ODD, st.lists(ODD)),
    )
)
def test_odd_values_in_a_record_are_shown_on_one_line(record):
    assert pretty_line(line({"at": "x", **record})).isprintable()


@given(st.text("0123456789. =ax", max_size=60))
def test_odd_values_in_a_line_of_text_are_shown_on_one_line(rest):
    begin = "2026-11-21T19:00:00.204+00:00 c:1 POST /x 200 completed "
    assert pretty_line(f"{begin}total_ms={rest}".encode()).isprintable()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "access.log"


def add(file, text):
    with file.open("ab") as opened:
        opened.write(text)


def read_lines(tail, count):
    """Read until there are `count` lines; the test's timeout ends a wait without result."""
    lines = []
    while len(lines) < count:
        lines += tail.more()
    return lines


@given(st.lists(st.binary(max_size=9).map(lambda raw: raw.replace(b"\n", b"")), max_size=9),
       st.integers(0, 12))  # fmt: skip
def test_the_last_lines_are_those_of_the_file(tmp_path_factory, lines, last):
    file = tmp_path_factory.getbasetemp() / "lines.log"
    file.write_bytes(b"".join(text + b"\n" for text in lines) + b"half")
    with Tail(file, last) as tail:
        assert tail.first == lines[max(0, len(lines) - last) :]


def test_a_long_file_is_read_from_its_end(file):
    lines = [b"%09d" % number for number in range(BLOCK_BYTES // 4)]
    file.write_bytes(b"".join(text + b"\n" for text in lines))
    with Tail(file, BLOCK_BYTES // 8) as tail:
        assert tail.first == lines[-BLOCK_BYTES // 8 :]


def test_a_line_is_returned_when_it_is_complete(file):
    file.write_bytes(b"one\nha")
    with Tail(file, 1, 0.001) as tail:
        assert tail.first == [b"one"]
        assert tail.more() == []
        add(file, b"lf\nmo")
        assert tail.more() == [b"half"]
        add(file, b"re\n")
        assert tail.more() == [b"more"]


def test_a_rotated_file_is_read_to_its_end_and_then_the_new_one(file):
    file.write_bytes(b"old\n")
    with Tail(file, 0, 0.001) as tail:
        assert tail.first == []
        file.rename(file.with_suffix(".1"))
        assert tail.more() == []  # the new file does not exist yet
        add(file.with_suffix(".1"), b"late\n")
        add(file, b"new\n")
        assert read_lines(tail, 2) == [b"late", b"new"]


def test_a_truncated_file_is_read_from_its_start(file):
    file.write_bytes(b"a long line\n")
    with Tail(file, 1, 0.001) as tail:
        os.truncate(file, 0)
        add(file, b"new\n")
        assert read_lines(tail, 1) == [b"new"]


def set_access_log(proxy, target):
    proxy.replies["/config"] = (200, {"config": {"server": {"access_log": target}}})


def test_the_log_path_comes_from_the_proxy_or_its_file(proxy, file, capsys):
    file.write_bytes(line(ACCESS) + b"\nplain text\n")
    set_access_log(proxy, str(file))
    assert main(["logs", "--url", proxy.url, "-n", "1"]) == 0
    assert capsys.readouterr().out == "plain text\n"
    toml = file.with_name("proxy.toml")
    toml.write_text(f'[server]\naccess_log = "{file}"\n')
    assert main(["logs", "--config", str(toml), "--raw"]) == 0
    assert capsys.readouterr().out == f"{line(ACCESS).decode()}\nplain text\n"
    assert main(["logs", "--file", str(file)]) == 0
    assert "completed" in capsys.readouterr().out


def test_a_relative_path_is_resolved_in_the_proxys_folder(proxy, file, capsys):
    file.write_bytes(b"found\n")
    set_access_log(proxy, os.path.relpath(file))
    proxy.replies["/status"] = (200, {"pid": os.getpid()})
    assert main(["logs", "--url", proxy.url]) == 0
    assert capsys.readouterr().out == "found\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [("off", 'access_log is "off": set it'), ("-", "stdout"), ("/nonexistent/x", "--file PATH")],
)
def test_a_missing_log_is_status_1_with_a_remedy(proxy, capsys, target, message):
    set_access_log(proxy, target)
    assert main(["logs", "--url", proxy.url]) == 1
    assert message in capsys.readouterr().err


def test_the_route_log_has_its_own_setting(proxy, capsys):
    proxy.replies["/config"] = (200, {"config": {"server": {"route_log": "off"}}})
    assert main(["logs", "--route", "--url", proxy.url]) == 1
    assert 'route_log = "route.log"' in capsys.readouterr().err
    assert main(["logs", "--url", proxy.url]) == 2
    assert "did not return its configuration" in capsys.readouterr().err


def test_an_unreachable_proxy_is_status_2_and_ctrl_c_is_130(file, capsys, monkeypatch):
    assert main(["logs", "--url", "http://127.0.0.1:1"]) == 2
    file.write_bytes(b"one\n")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    assert main(["logs", "--follow", "--file", str(file)]) == 130
    assert capsys.readouterr().out == "one\n"
