import socket
from pathlib import Path

import pytest

from omni_proxy.replica import http_server, llamacpp, replica_command
from omni_proxy.replica.kv_transfer.request_fields import TransferFields
from omni_proxy.replica.model_file import MODELS, ModelFileError

LLAMACPP = ["--engine", "llamacpp"]


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    calls = []

    def fetch(model, cache, _report):
        calls.append((model, cache))
        return cache / model.file

    monkeypatch.setattr(replica_command, "fetch", fetch)
    return calls


def test_fetch_prints_the_path_and_exits_with_0(fetched, capsys):
    assert replica_command.main(["fetch", "smollm2-135m", "--cache", "/c"]) == 0
    assert capsys.readouterr().out == f"/c/{MODELS['smollm2-135m'].file}\n"
    assert fetched == [(MODELS["smollm2-135m"], Path("/c"))]


def test_the_llamacpp_server_gets_the_arguments(monkeypatch):
    served = []
    monkeypatch.setattr(llamacpp, "serve", served.append)
    argv = "--port 31005 --threads 2 --parallel 3 --context 512 --model-name chat --cache /c"
    replica_command.main([*LLAMACPP, *argv.split(), "--no-embeddings"])
    assert served == [
        llamacpp.LlamaServerConfig(
            model_path=Path("/c") / MODELS["smollm2-135m"].file,
            model_name="chat",
            host="127.0.0.1",
            port=31005,
            threads=2,
            parallel=3,
            context=512,
            embeddings=False,
            log_level="info",
        )
    ]


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_be_in_brackets(monkeypatch, host):
    served = []
    monkeypatch.setattr(llamacpp, "serve", served.append)
    replica_command.main([*LLAMACPP, "--host", host])
    assert served[0].host == "::1"


def test_the_model_is_served_under_its_own_name_unless_requested_otherwise(monkeypatch):
    served = []
    monkeypatch.setattr(llamacpp, "serve", served.append)
    replica_command.main(LLAMACPP)
    assert served[0].model_name == "smollm2-135m"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--port", "0"], "--port: 0 is not within 1 and 65535"),
        (["--port", "http"], "--port: invalid port_number value: 'http'"),
        (["--host", "[h]"], "--host: [h] is not an IPv6 address in brackets"),
        (["--host", "[::1"], "--host: [::1 is not an IPv6 address in brackets"),
        (["--threads", "0"], "--threads: 0 is less than 1"),
        (["--model", "gpt"], "--model: 'gpt' is not one of tiny, smollm2-135m, nor a path to a"),
        ([*LLAMACPP, "--model", "tiny"], "--model tiny needs --engine torch"),
        (["--speech", "espeak"], "--speech: invalid choice: 'espeak'"),
        (["--max-in-flight", "-1"], "--max-in-flight: -1 is less than 0"),
        (["--drain-secs", "-1"], "--drain-secs: -1 is not within 0 and 3600"),
        (
            ["--weights-stall-secs", "0"],
            "--weights-stall-secs: 0 must be above 0 and at most 3600",
        ),
        (["--bootstrap-port", "65536"], "-bootstrap-port: 65536 is not within 0 and 65535"),
        (["--kv-lease-secs", "3601"], "--kv-lease-secs: 3601 must be above 0 and at most 3600"),
        (["--kv-max-bytes", "0"], "--kv-max-bytes: 0 is less than 1"),
        (["--images", "yes"], "--images: invalid choice: 'yes'"),
        (["--own-process", "prepare"], "--own-process: invalid choice: 'prepare'"),
        (["--modle", "x"], "unrecognized arguments: --modle"),
        (["fetch"], "required: model"),
    ],
)
def test_invalid_arguments_exit_with_2_and_are_named(argv, reason, capsys):
    with pytest.raises(SystemExit) as caught:
        replica_command.main(argv)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_failed_fetch_exits_with_1(monkeypatch, capsys):
    def fetch(*_):
        raise ModelFileError("no disk")

    monkeypatch.setattr(replica_command, "fetch", fetch)
    assert replica_command.main(LLAMACPP) == 1
    assert "error: no disk" in capsys.readouterr().err


def test_ctrl_c_during_a_fetch_exits_without_a_traceback(monkeypatch):
    def fetch(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(replica_command, "fetch", fetch)
    assert replica_command.main(["fetch", "smollm2-135m"]) == replica_command.INTERRUPTED


def test_the_error_about_a_missing_engine_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(replica_command.sys.modules, "xllamacpp", None)
    assert replica_command.main(LLAMACPP) == 1
    assert "pip install 'omni-proxy[replica]'" in capsys.readouterr().err


def test_a_port_in_use_exits_with_1_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(llamacpp, "_engine", object)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert replica_command.main([*LLAMACPP, "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


class ProcessExit(Exception):
    """Raised instead of exiting the process."""


@pytest.fixture
def launched(monkeypatch):
    calls = []

    async def launch_server(pipeline, **options):
        calls.append((pipeline, options))

    def exit_process(status):
        raise ProcessExit(status)

    monkeypatch.setattr(http_server, "launch_server", launch_server)
    monkeypatch.setattr(replica_command, "exit_process", exit_process)
    monkeypatch.setattr(replica_command, "_check_installed", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return calls


def status_of(argv):
    with pytest.raises(ProcessExit) as caught:
        replica_command.main(argv)
    return caught.value.args[0]


def test_torch_is_the_default_engine(launched, tmp_path):
    assert status_of(["--cache", str(tmp_path)]) == 0
    ((pipeline, options),) = launched
    assert [stage.name for stage in pipeline.stages] == ["prepare", "decode"]
    assert (options["host"], options["port"]) == ("127.0.0.1", 31000)
    assert options["model_name"] == "smollm2-135m"
    assert "admin_api_key" not in options
    assert options["capabilities"] == {"chat", "streaming"}


def test_all_arguments_are_passed_to_the_server(launched):
    argv = (
        "--model tiny --model-name small --speech hibari --transcription whisper-tiny --host ::1 "
        "--port 31005 --admin-api-key secret --stream-speech-as pcm --max-in-flight 3 "
        "--max-running 2 --threads 2 --own-process speak --drain-secs 1 --log-level error "
        "--cache /c --weights-root /w --profile-root /p --enable-tensor-updates --tp 2 "
        "--weights-isolation thread --dialect vllm --stored-responses 3 "
        "--weights-join-secs 1 --weights-ready-secs 2 --weights-receive-secs 3 "
        "--weights-stall-secs 4"
    )
    assert status_of(argv.split()) == 0
    ((pipeline, options),) = launched
    stages = {stage.name: stage for stage in pipeline.stages}
    assert list(stages) == ["transcribe", "prepare", "decode", "speak"]
    assert stages["speak"].process == "speak"
    assert stages["decode"].params == {
        "model": "tiny",
        "max_running": 2,
        "threads": 2,
        "tp": 2,
        "weights_root": "/w",
        "weights_isolation": "thread",
        "weights_join_secs": 1.0,
        "weights_ready_secs": 2.0,
        "weights_receive_secs": 3.0,
        "weights_stall_secs": 4.0,
    }
    assert stages["transcribe"].params == {"path": "/c/whisper-tiny.en/model.bin", "threads": 2}
    assert pipeline.max_in_flight == 3
    assert {key: options[key] for key in options if key != "capabilities"} == {
        "host": "::1",
        "port": 31005,
        "drain_secs": 1.0,
        "log_level": "error",
        "model_name": "small",
        "model_path": "tiny",
        "stream_speech_as": "pcm",
        "admin_api_key": "secret",
        "enable_tensor_updates": True,
        "profile_root": Path("/p"),
        "dialect": "vllm",
        "tokenizer_model": "tiny",
        "stored_responses": 3,
        "transfer": TransferFields(connector="nixl"),
    }


@pytest.mark.parametrize(
    ("argv", "root"),
    [
        ("", "/"),
        ("--host ::1", "/"),
        ("--host localhost", "/"),
        ("--host 0.0.0.0", ""),
        ("--host 0.0.0.0 --admin-api-key secret", "/"),
        ("--host 0.0.0.0 --weights-root /w", "/w"),
        ("--weights-root /w/../w", "/w/../w"),
    ],
)
def test_without_a_key_only_loopback_clients_can_name_files_to_read_weights_from(
    launched, argv, root
):
    status_of(["--model", "tiny", *argv.split()])
    assert launched[0][0].stages[1].params["weights_root"] == root


def test_a_key_in_the_environment_lets_clients_name_any_file(launched, monkeypatch):
    monkeypatch.setenv("SGLANG_OMNI_ADMIN_KEY", "secret")
    status_of(["--model", "tiny", "--host", "0.0.0.0"])
    assert launched[0][0].stages[1].params["weights_root"] == "/"


@pytest.mark.parametrize("module", ["stages.text", "text.stage"], ids=["current", "old"])
def test_a_text_stage_in_a_pipeline_file_may_override_the_weights_root(launched, tmp_path, module):
    factory = f"omni_proxy.replica.{module}:build"
    stage = f'[[stages]]\nname = "{{}}"\nfactory = "{factory}"\n{{}}\n'
    (tmp_path / "p.toml").write_text(
        'name = "mine"\n'
        + stage.format("a", 'next = ["b"]')
        + stage.format("b", 'terminal = true\nparams = {weights_root = "/own"}')
    )
    assert status_of(["--pipeline", str(tmp_path / "p.toml"), "--weights-root", "/w"]) == 0
    roots = [stage.params["weights_root"] for stage in launched[0][0].stages]
    assert roots == ["/w", "/own"]


def test_stages_read_the_model_from_the_given_cache_folder(launched, fetched, tmp_path):
    status_of(["--cache", str(tmp_path)])
    (stage, _) = launched[0][0].stages
    assert stage.params == {"model": str(tmp_path / MODELS["smollm2-135m"].file)}
    assert fetched == [(MODELS["smollm2-135m"], tmp_path)]


def test_a_file_in_the_default_cache_is_checked_by_its_stage_and_not_fetched(
    launched, fetched, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = replica_command.cache_folder(replica_command.os.environ)
    status_of([])
    assert fetched == [(MODELS["smollm2-135m"], cache)]
    cache.mkdir(parents=True)
    (cache / MODELS["smollm2-135m"].file).touch()
    status_of([])
    assert len(fetched) == 1
    (stage, _) = launched[1][0].stages
    assert stage.params == {"model": "smollm2-135m"}


def test_the_environment_is_set_before_a_model_runtime_can_read_it(launched):
    status_of(["--model", "tiny", "--threads", "3"])
    assert replica_command.os.environ["OMP_NUM_THREADS"] == "3"
    assert replica_command.os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_pipeline_from_a_file_is_served_under_its_name(launched, tmp_path):
    (tmp_path / "p.toml").write_text(
        'name = "mine"\n[[stages]]\nname = "a"\nfactory = "a:b"\nterminal = true\n'
    )
    assert status_of(["--pipeline", str(tmp_path / "p.toml")]) == 0
    ((pipeline, options),) = launched
    assert (pipeline.name, options["model_name"]) == ("mine", "mine")
    assert options["capabilities"] is None


def test_an_invalid_pipeline_exits_with_2_and_one_line_for_each_problem(launched, tmp_path, capsys):
    (tmp_path / "p.toml").write_text("nam = 1\nentrie = 2")
    assert status_of(["--pipeline", str(tmp_path / "p.toml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("p.toml: ")[2] for line in lines] == [
        "nam: unknown key; did you mean name?",
        "entrie: unknown key; did you mean entries?",
        "name: is missing",
    ]


def test_the_error_about_missing_packages_says_how_to_install_them(monkeypatch, capsys):
    monkeypatch.setattr(replica_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        replica_command.MissingPackageError, match=r"torch, .*omni-proxy\[replica\]"
    ):
        replica_command._check_installed(replica_command.REQUIRED_PACKAGES)


def test_the_ocr_stage_exists_only_if_requested(launched):
    status_of(["--model", "tiny", "--images", "ocr", "--threads", "2", "--own-process", "look"])
    status_of(["--model", "tiny"])
    (with_ocr, options), (without_ocr, options_without_ocr) = launched
    assert [stage.name for stage in with_ocr.stages] == ["look", "prepare", "decode"]
    assert (with_ocr.stages[0].params, with_ocr.stages[0].process) == ({"threads": 2}, "look")
    assert options["capabilities"] - options_without_ocr["capabilities"] == {"image_input"}
    assert [stage.name for stage in without_ocr.stages] == ["prepare", "decode"]


def test_ocr_without_its_packages_exits_with_1_and_says_what_to_install(monkeypatch, capsys):
    def exit_process(status):
        raise ProcessExit(status)

    monkeypatch.setattr(replica_command, "exit_process", exit_process)
    monkeypatch.setattr(replica_command, "REQUIRED_PACKAGES", ())
    monkeypatch.setattr(replica_command.importlib.util, "find_spec", lambda name: None)
    assert status_of(["--model", "tiny", "--images", "ocr"]) == 1
    assert "PIL; run pip install 'omni-proxy[ocr]'" in capsys.readouterr().err


def test_a_port_in_use_exits_the_torch_engine_with_1(monkeypatch, capsys):
    def exit_process(status):
        raise ProcessExit(status)

    monkeypatch.setattr(replica_command, "exit_process", exit_process)
    monkeypatch.setattr(replica_command, "_check_installed", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert status_of(["--model", "tiny", "--port", port]) == 1
    assert f"error: cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_the_profile_command_prints_a_report(tmp_path, capsys):
    assert replica_command.main(["profile", str(tmp_path)]) == 0
    assert "# Requests: 0" in capsys.readouterr().out


def test_an_unexpected_error_is_reported_and_exits_with_1(launched, monkeypatch, caplog):
    async def launch_server(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(http_server, "launch_server", launch_server)
    assert status_of(["--model", "tiny"]) == 1
    assert "replica_crashed" in caplog.text
    assert "RuntimeError: a bug" in caplog.text
