import socket
from pathlib import Path

import pytest

from omni_proxy.replica import command, llamacpp
from omni_proxy.replica.model_file import MODELS, ModelFileError


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    calls = []

    def fetch(model, cache, _say):
        calls.append((model, cache))
        return cache / model.file

    monkeypatch.setattr(command, "fetch", fetch)
    return calls


def test_fetch_prints_the_path_and_ends_with_0(fetched, capsys):
    assert command.main(["fetch", "smollm2-135m", "--cache", "/c"]) == 0
    assert capsys.readouterr().out == f"/c/{MODELS['smollm2-135m'].file}\n"
    assert fetched == [(MODELS["smollm2-135m"], Path("/c"))]


def test_serving_gets_what_the_arguments_say(monkeypatch):
    served = []
    monkeypatch.setattr(llamacpp, "serve", served.append)
    argv = "--port 31005 --threads 2 --parallel 3 --context 512 --model-name chat --cache /c"
    command.main(argv.split())
    assert served == [
        llamacpp.Serving(
            model_path=Path("/c") / MODELS["smollm2-135m"].file,
            model_name="chat",
            host="127.0.0.1",
            port=31005,
            threads=2,
            parallel=3,
            context=512,
            log_level="info",
        )
    ]


def test_the_model_is_served_under_its_own_name_unless_told_otherwise(monkeypatch):
    served = []
    monkeypatch.setattr(llamacpp, "serve", served.append)
    command.main([])
    assert served[0].model_name == "smollm2-135m"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--port", "0"], "--port: 0 is not within 1 and 65535"),
        (["--port", "http"], "--port: invalid port_number value: 'http'"),
        (["--threads", "0"], "--threads: 0 is less than 1"),
        (["--model", "gpt"], "--model: invalid choice: 'gpt'"),
        (["--modle", "x"], "unrecognized arguments: --modle"),
        (["fetch"], "required: model"),
    ],
)
def test_wrong_arguments_end_with_2_and_name_themselves(argv, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(argv)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_failed_fetch_ends_with_1(monkeypatch, capsys):
    def fetch(*_):
        raise ModelFileError("no disk")

    monkeypatch.setattr(command, "fetch", fetch)
    assert command.main([]) == 1
    assert "error: no disk" in capsys.readouterr().err


def test_a_ctrl_c_while_fetching_ends_without_a_traceback(monkeypatch):
    def fetch(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fetch", fetch)
    assert command.main(["fetch", "smollm2-135m"]) == command.INTERRUPTED


def test_a_missing_engine_is_told_with_the_cure(monkeypatch, capsys):
    monkeypatch.setitem(command.sys.modules, "xllamacpp", None)
    assert command.main([]) == 1
    assert "pip install 'omni-proxy[replica]'" in capsys.readouterr().err


def test_a_taken_port_ends_with_1_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(llamacpp, "_engine", object)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert command.main(["--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
