import pytest

from omni_proxy.wire import proxy_protocol
from tools import fuzz

FIRST = b"PROXY UNKNOWN\r\n"
SAME = FIRST + b"more"
OTHER = b"PROXY TCP4 1.1.1.1 2.2.2.2 3 4\r\n"


def test_an_input_without_new_coverage_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path / "corpus")
    inputs = tmp_path / "found"
    inputs.mkdir()
    for name, data in (("a", SAME), ("b", FIRST), ("c", OTHER)):
        (inputs / name).write_bytes(data)
    assert fuzz.keep("proxy_header", inputs) == 2
    kept = {file.read_bytes() for file in (tmp_path / "corpus/proxy_header").iterdir()}
    assert kept == {FIRST, OTHER}
    assert fuzz.keep("proxy_header", inputs) == 0


def test_a_parse_result_that_differs_is_a_finding(monkeypatch):
    wrong_header = proxy_protocol.ProxyHeader(3, "")
    monkeypatch.setattr(proxy_protocol, "parse_proxy_header", lambda data: wrong_header)
    with pytest.raises(fuzz.Finding):
        fuzz.read_proxy_header(FIRST)
