import socket

import pytest

from omni_proxy.cli import launch
from omni_proxy.cli.launch import EngineCommandError, free_ports, main, main_router
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config


@pytest.fixture
def started(monkeypatch):
    """The startups that were passed to `start`, which starts nothing here."""
    startups = []

    def start(startup):
        startups.append(startup)
        return 0

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "visible_gpus", lambda environ: [])
    return startups


def test_dp_size_is_the_number_of_replicas(started):
    args = "--model-path tiny --dp-size 4 --host 0.0.0.0 --worker-base-port 41000"
    assert main(args.split()) == 0
    config = started[0].effective_config(Config())
    (entry,) = config.launch
    assert entry.replicas == 4
    assert entry.command[:4] == ("omni-proxy", "replica", "--model", "tiny")
    assert entry.base_port >= 41000
    assert config.server.host == "0.0.0.0"
    assert config.routing.policy == "cache_aware"


def test_a_flag_of_the_router_is_not_passed_to_the_engine(started, capsys):
    for args in (["--router-worker-config", "f"], ["--backend=vllm"], ["--backend", "vllm"]):
        with pytest.raises(SystemExit) as exited:
            main(["--model-path", "tiny", *args])
        assert exited.value.code == 2
        name = args[0].partition("=")[0]
        assert f"\n  {name}: use " in capsys.readouterr().err
    assert main(["--model-path", "org/m", "--", "--backend", "x"]) == 0
    assert started[0].effective_config(Config()).launch[0].command[-2:] == ("--backend", "x")


def test_router_flags_are_accepted_with_and_without_the_router_prefix(started):
    main(
        ["--policy", "random", "--router-max-total-retries", "2", "--router-cache-threshold", "0.9"]
    )
    routing = started[0].effective_config(Config()).routing
    assert routing.policy == "random"
    assert routing.max_total_retries == 2
    assert routing.cache_aware.cache_threshold == 0.9


def test_all_flags_of_sglang_omni_router_are_accepted(started):
    args = (
        "--worker-urls http://127.0.0.1:1 http://127.0.0.1:2 --cache-threshold 0.3 "
        "--balance-abs-threshold 9 --balance-rel-threshold 1.2 --eviction-interval 7 "
        "--max-tree-size 1000 --max-worker-retries 4 --max-total-retries 5"
    )
    assert main_router(args.split()) == 0
    startup = started[0]
    routing = startup.effective_config(Config()).routing
    cache = routing.cache_aware
    assert startup.flag_urls == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert (routing.policy, routing.max_worker_retries, routing.max_total_retries) == (
        "cache_aware", 4, 5,
    )  # fmt: skip
    assert (cache.cache_threshold, cache.balance_abs_threshold) == (0.3, 9)
    assert (cache.balance_rel_threshold, cache.eviction_interval_secs) == (1.2, 7)
    assert cache.max_tree_size == 1000


def test_eviction_interval_secs_is_accepted_too(started):
    main_router(["--worker-urls", "http://127.0.0.1:1", "--eviction-interval-secs", "8"])
    assert started[0].effective_config(Config()).routing.cache_aware.eviction_interval_secs == 8


def test_flags_of_later_routers_are_accepted(started):
    args = (
        "--worker-urls http://127.0.0.1:1 --retry-max-retries 4 --cb-failure-threshold 9 "
        "--max-concurrent-requests -1 --queue-size 50 --queue-timeout-secs 7 --log-level warn"
    )
    main_router(args.split(" "))
    config = started[0].effective_config(Config())
    assert (config.routing.max_total_retries, config.routing.max_worker_retries) == (4, 9)
    server = config.server
    assert (server.max_inflight, server.queue_size, server.queue_timeout_secs) == (0, 50, 7)
    assert server.log_level == "warning"


def test_unknown_flags_are_passed_to_the_engine(started):
    main(
        [
            "--engine",
            "sglang",
            "--model-path",
            "org/m",
            "--mem-fraction-static",
            "0.8",
            "--",
            "--log-level",
            "x",
        ]
    )
    command = started[0].launch[0].command
    assert command[-4:] == ("--mem-fraction-static", "0.8", "--log-level", "x")


def test_a_complete_command_can_be_given(started):
    main(["--command", "serve 'a b' --at {host}:{port}", "--dp-size", "2"])
    assert started[0].launch[0].command == ("serve", "a b", "--at", "{host}:{port}")


def test_replicas_may_listen_on_an_ipv6_address_in_brackets(started, capsys):
    assert main(["--worker-host", "[::1]", "--host", "[::]"]) == 0
    config = started[0].effective_config(Config())
    assert (config.launch[0].host, config.server.host) == ("::1", "::")
    with pytest.raises(SystemExit):
        main(["--worker-host", "[h]"])
    assert "--worker-host: " in capsys.readouterr().err


def test_with_a_file_the_default_policy_is_that_of_the_file(started, tmp_path):
    file = tmp_path / "p.toml"
    file.write_text("")
    main(["--config", str(file), "--model-path", "tiny"])
    assert started[0].effective_config(Config()).routing.policy == "round_robin"


def test_each_replica_gets_a_gpu_per_rank_if_there_are_gpus(started, monkeypatch):
    monkeypatch.setattr(launch, "visible_gpus", lambda environ: ["0", "1", "2", "3"])
    main(["--engine", "vllm", "--model-path", "org/m", "--tp-size", "2", "--dp-size", "2"])
    assert started[0].launch[0].gpus_per_replica == 2
    main(["--model-path", "tiny"])
    assert started[1].launch[0].gpus_per_replica == 0


@pytest.mark.parametrize(
    "args",
    [
        "--dp-size 0",
        "--dp-size two",
        "--engine unknown",
        "--command x --unknown y",
        "--worker-base-port 0",
    ],
)
def test_invalid_flags_are_refused(started, args, capsys):
    with pytest.raises(SystemExit) as exited:
        main(args.split())
    assert exited.value.code == 2
    assert not started
    assert "_count" not in capsys.readouterr().err


def test_a_command_with_an_open_quote_is_refused(started, capsys):
    assert main(["--command", "it's"]) == 2
    assert "--command: No closing quotation" in capsys.readouterr().err
    assert not started


def test_a_model_that_the_engine_cannot_load_is_refused_before_anything_starts(started, capsys):
    assert main(["--engine", "vllm", "--model-path", "tiny"]) == 2
    assert "leave --engine out" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize("args", [[], ["--worker-urls"]])
def test_a_router_may_start_without_workers(started, args):
    assert main_router([*args, "--port", "0"]) == 0
    assert started[0].flag_urls == ()
    assert started[0].effective_config(Config()).routing.policy == "cache_aware"


def test_by_default_a_worker_can_recover_after_a_long_outage(started, tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text('[health]\non_threshold = "dead"\n')
    args = ["--worker-urls", "http://127.0.0.1:1"]
    main_router(args)
    main(["--model-path", "tiny"])
    main_router([*args, "--config", str(file)])
    bases = [parse(s.config_path.read_text()) if s.config_path else Config() for s in started]
    thresholds = [
        s.effective_config(base).health.on_threshold for s, base in zip(started, bases, strict=True)
    ]
    assert thresholds == ["unhealthy", "unhealthy", "dead"]


def test_a_block_of_ports_with_a_port_in_use_is_skipped():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        if port < 60000:
            assert free_ports("127.0.0.1", port - 1, 3) > port
        with pytest.raises(EngineCommandError, match="free ports"):
            free_ports("127.0.0.1", 65535, 2)


def test_an_unknown_worker_host_is_refused():
    with pytest.raises(EngineCommandError, match="worker-host"):
        free_ports("no.such.host.invalid", 31000, 1)


@pytest.mark.parametrize("command", [main, main_router])
def test_help_has_the_default_policy_of_these_commands(command, capsys):
    with pytest.raises(SystemExit):
        command(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert "cache_aware (default)" in output
    assert "round_robin (default)" not in output


def test_verbose_sets_the_log_level(started):
    main_router(["--verbose"])
    main(["--model-path", "tiny", "--router-verbose", "--verbose"])
    assert [startup.effective_config(Config()).server.log_level for startup in started] == [
        "debug"
    ] * 2
    assert started[1].launch[0].command[-1] == "--verbose"


def test_help_shows_how_to_pass_engine_flags(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "go to the engine" in capsys.readouterr().out


def test_without_a_file_retries_and_overload_status_are_those_of_other_routers(started, tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text("")
    assert main_router([]) == main(["--model-path", "tiny"]) == 0
    assert main_router(["--config", str(file)]) == 0
    *without_file, with_file = (startup.effective_config(Config()) for startup in started)
    for config in without_file:
        assert {"408", "429", "500", "502", "503", "504"} < set(config.routing.retry_on)
        assert config.server.overload_status == 429
    assert with_file.routing.retry_on == Config().routing.retry_on
    assert with_file.server.overload_status == 503


@pytest.mark.parametrize("args", ["--dp 3 --tp 2", "--dp-size 3 --tp-size 2", "-dp 3 -tp 2"])
def test_short_flags_of_engines_for_sizes_are_accepted(started, args):
    assert main(["--engine", "vllm", "--model-path", "org/m", *args.split()]) == 0
    (entry,) = started[0].effective_config(Config()).launch
    assert entry.replicas == 3
    assert entry.command[-2:] != ("-tp", "2")
    assert entry.command[3:5] == ("--tensor-parallel-size", "2")


def test_short_flags_of_vllm_are_passed_to_other_engines_unchanged(started):
    args = ["--engine", "llamacpp", "--model-path", "m.gguf", "-t", "4", "-tp", "2"]
    assert main(args) == 0
    assert started[0].launch[0].command[-4:] == ("-t", "4", "-tp", "2")
    assert main(["--engine", "vllm", "--model-path", "org/m", "--", "-tp", "2"]) == 0
    assert started[1].launch[0].command[-2:] == ("-tp", "2")


def test_prefill_and_decode_replicas_are_two_groups_with_roles(started):
    args = "--prefill 1 --decode 2 --model-path tiny --worker-base-port 41000"
    assert main([*args.split(), "--kv-connector", "nixl", "--threads", "2"]) == 0
    prefill, decode = started[0].effective_config(Config()).launch
    assert (prefill.name, prefill.role, prefill.replicas) == ("prefill", "prefill", 1)
    assert (decode.name, decode.role, decode.replicas) == ("decode", "decode", 2)
    assert decode.base_port > prefill.base_port
    assert {prefill.kv_connector, decode.kv_connector} == {"nixl"}
    command = ("omni-proxy", "replica", "--model", "tiny", "--role")
    address = ("--host", "{host}", "--port", "{port}", "--threads", "2")
    port = ("--bootstrap-port", "{bootstrap_port}")
    nixl = ("--kv-connector", "nixl")
    assert prefill.command == (*command, "prefill", *port, *nixl, *address)
    assert decode.command == (*command, "decode", *nixl, *address)


def test_sglang_engines_are_started_with_their_roles(started):
    assert main(["--prefill", "1", "--decode", "1", "--model-path", "org/m"]) == 0
    prefill, decode = started[0].effective_config(Config()).launch
    mode = ("--disaggregation-mode", "prefill")
    assert (*mode, "--disaggregation-bootstrap-port", "{bootstrap_port}") == prefill.command[5:9]
    assert "--disaggregation-bootstrap-port" not in decode.command


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        ("--prefill 1", "pass a number for both"),
        ("--decode 1", "pass a number for both"),
        ("--prefill 1 --decode 1 --dp-size 2", "leave it out"),
        ("--prefill 1 --decode 1 --tp-size 2", "leave it out"),
        ("--prefill 1 --decode 1 --command x", "[[launch]] groups with a role"),
        ("--prefill 1 --decode 1 --engine vllm --model-path m", "[[launch]] groups with a role"),
        ("--prefill 1 --decode 1 --engine sglang --model-path m --kv-connector nixl", "leave it"),
        ("--kv-connector nixl", "is for --prefill and --decode"),
    ],
)
def test_roles_that_cannot_be_started_are_refused_with_a_remedy(started, capsys, args, remedy):
    assert main(["--model-path", "tiny", *args.split()]) == 2
    assert remedy in capsys.readouterr().err
    assert started == []


def test_replicas_that_publish_kv_events_have_their_own_ports(started):
    args = ["--model-path", "tiny", "--dp-size", "2", "--kv-events", "tcp://*:5557"]
    assert main(args) == 0
    (entry,) = started[0].effective_config(Config()).launch
    assert entry.kv_events == "auto"
    assert entry.command[-2:] == ("--kv-events", "tcp://*:{5557+index}")
    main(["--model-path", "tiny", "--dp-size", "2"])
    assert started[1].effective_config(Config()).launch[0].kv_events == "off"


def test_decode_replicas_publish_on_the_ports_after_prefill_replicas(started):
    args = [
        "--model-path",
        "tiny",
        "--prefill",
        "2",
        "--decode",
        "2",
        "--kv-events",
        "tcp://*:5557",
    ]
    assert main(args) == 0
    entries = started[0].effective_config(Config()).launch
    assert [entry.command[-1] for entry in entries] == [
        "tcp://*:{5557+index}", "tcp://*:{5559+index}",
    ]  # fmt: skip


def test_ports_of_kv_events_that_would_overlap_are_refused(started, capsys):
    args = "--model-path tiny --dp-size 2 --kv-events tcp://*:5557 --kv-replay tcp://*:5558"
    assert main(args.split()) == 2
    assert "ports 5557 and 5558 are too close for 2 replicas" in capsys.readouterr().err
    assert not started
