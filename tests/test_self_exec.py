import sys

from omni_proxy.self_exec import program_argv


def test_the_command_that_restarts_the_program_is_that_of_its_start(monkeypatch, tmp_path):
    assert program_argv() == [sys.executable, "-m", "omni_proxy"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dist/omni-proxy.pyz", "--config", "x"])
    assert program_argv() == [sys.executable, str(tmp_path / "dist/omni-proxy.pyz")]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert program_argv() == [sys.executable]
