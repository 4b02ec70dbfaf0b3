import sys

from omni_proxy.self_exec import program_argv


def test_it_starts_again_as_it_was_started(monkeypatch, tmp_path):
    assert program_argv() == [sys.executable, "-m", "omni_proxy"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dist/omni-proxy.pyz", "--config", "x"])
    assert program_argv() == [sys.executable, str(tmp_path / "dist/omni-proxy.pyz")]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert program_argv() == [sys.executable]
