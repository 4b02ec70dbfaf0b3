import pytest

from omni_proxy.compat import scripts
from omni_proxy.config.schema import Config


@pytest.fixture
def startups(monkeypatch):
    recorded = []
    monkeypatch.setattr(scripts, "start", lambda startup: recorded.append(startup) or 0)
    return recorded


def test_the_commands_have_the_defaults_of_their_routers(startups):
    assert scripts.sglang_main(["launch"]) == scripts.launch_vllm([]) == 0
    sglang, vllm = (startup.effective_config(Config()) for startup in startups)
    assert (sglang.server.host, vllm.server.host) == ("0.0.0.0", "127.0.0.1")
    assert (sglang.admin.metrics_listen, vllm.admin.metrics_listen) == (
        "0.0.0.0:29000",
        "127.0.0.1:29000",
    )
    assert [startup.dialect for startup in startups] == ["sglang", "vllm"]


def test_the_command_line_of_prime_rl_is_accepted(startups):
    arguments = (
        "--policy sticky_least_loaded --host 0.0.0.0 --port 8000 --request-id-headers x-session-id "
        "--prometheus-port 29001 --worker-startup-timeout-secs 4200 --log-level debug "
        "--worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000"
    )
    assert scripts.launch_vllm(arguments.split()) == 0
    (startup,) = startups
    config = startup.effective_config(Config())
    assert config.routing.sticky_sessions
    assert config.server.request_id_headers == ("x-session-id",)
    assert config.health.startup_timeout_secs == 4200
    assert len(startup.flag_urls) == 2
    assert startup.warnings == ()


def test_an_unsupported_connector_is_refused_with_alternatives(startups, capsys):
    arguments = (
        "--vllm-pd-disaggregation --prefill http://p:1 --decode http://d:1 --kv-connector moriio"
    )
    assert scripts.launch_vllm(arguments.split()) == 2
    message = capsys.readouterr().err
    assert '"moriio" is not supported; use nixl or mooncake' in message
    assert startups == []


def test_prefill_and_decode_workers_are_served(startups):
    arguments = "--vllm-pd-disaggregation --prefill http://p:1 --prefill http://q:1 none "
    assert scripts.launch_vllm((arguments + "--decode http://d:1").split()) == 0
    (startup,) = startups
    assert [worker.url for worker in startup.pool_workers] == [
        "http://p:1", "http://q:1", "http://d:1"
    ]  # fmt: skip


def test_a_mistyped_flag_has_a_suggestion(startups, capsys):
    with pytest.raises(SystemExit):
        scripts.launch_sglang(["--polcy", "random"])
    assert "did you mean `--policy`" in capsys.readouterr().err


def test_sglang_router_has_its_subcommands(startups, capsys, monkeypatch):
    assert scripts.sglang_main([]) == 2
    assert "launch" in capsys.readouterr().err
    assert scripts.sglang_main(["--help"]) == 0
    assert "server" in capsys.readouterr().out
    assert scripts.sglang_main(["--version"]) == 0
    assert "sglang-router" in capsys.readouterr().out
    monkeypatch.setattr(
        "omni_proxy.cli.launch.start", lambda startup: startups.append(startup) or 0
    )
    assert scripts.sglang_main(["server", "--model-path", "tiny", "--dp-size", "2"]) == 0
    assert startups[0].launch[0].replicas == 2
