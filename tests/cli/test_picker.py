import pytest

from omni_proxy.cli import serve

URL = "http://127.0.0.1:1"


@pytest.fixture
def started(monkeypatch):
    startups = []
    monkeypatch.setattr(serve, "start", lambda startup: startups.append(startup) or 0)
    return startups


def test_the_picker_runs_with_one_process(started, monkeypatch):
    monkeypatch.setattr(serve, "_is_installed", lambda name: True)
    assert serve.main_picker(["--worker-urls", URL, "--port", "0"]) == 0
    assert started[0].picker
    assert started[0].overrides["server.processes"] == 1


def test_missing_packages_are_reported(started, monkeypatch, capsys):
    monkeypatch.setattr(serve, "NEEDED", ("no_such_package", "json.no_such.module"))
    assert serve.main_picker(["--worker-urls", URL]) == 2
    assert "omni-proxy[picker]" in capsys.readouterr().err
    assert started == []


def test_without_workers_the_picker_is_refused(started, capsys):
    with pytest.raises(SystemExit) as exited:
        serve.main_picker(["--port", "0"])
    assert exited.value.code == 2
    assert "--config FILE" in capsys.readouterr().err
