import logging
from functools import cache
from pathlib import Path

import pytest

from omni_proxy import server
from omni_proxy.cli import launch, serve
from omni_proxy.cli.flags.command_parser import THEIRS, nearest_flag
from omni_proxy.cli.flags.engine_commands import ENGINES
from omni_proxy.cli.flags.other_router_flags import (
    JOINED,
    LISTS,
    MISSING,
    SWITCHES,
    VALUED,
    WITHOUT_EFFECT,
    explain_missing_flag,
)
from omni_proxy.cli.flags.start_parsers import launch_parser, router_parser
from omni_proxy.cli.launch import main, main_router
from omni_proxy.config.schema import Config

MIGRATION = (Path(__file__).parents[3] / "docs/migration.md").read_text()
# All flags of sglang-router 0.3.2, smg 1.13 and vllm-router 0.1.17.
OTHER_ROUTER_FLAGS = (Path(__file__).parent / "other_router_flags.txt").read_text().split()


def flags_of(parser):
    return {name for action in parser._actions for name in action.option_strings}


@cache
def flags_of_routers():
    return flags_of(router_parser())


@pytest.fixture
def started(monkeypatch):
    startups = []
    monkeypatch.setattr(launch, "start", lambda startup: startups.append(startup) or 0)
    monkeypatch.setattr(launch, "visible_gpus", lambda environ: [])
    return startups


@pytest.mark.parametrize("flag", OTHER_ROUTER_FLAGS)
def test_every_flag_of_other_routers_is_accepted_or_explained(flag):
    assert flag in flags_of_routers() or flag in THEIRS or explain_missing_flag(flag)


def test_no_flag_is_both_accepted_and_refused():
    accepted = flags_of_routers()
    assert not [flag for flag in accepted if explain_missing_flag(flag) or flag in THEIRS]
    assert not set(VALUED) & set(WITHOUT_EFFECT)


def test_a_command_line_of_sglang_router_has_a_warning_per_flag_without_effect(started):
    arguments = (
        "--worker-urls http://127.0.0.1:1 --policy cache_aware --retry-max-retries 3 "
        "--retry-initial-backoff-ms 10 --retry-max-backoff-ms 100 --retry-backoff-multiplier 2 "
        "--retry-jitter-factor 0 --cb-failure-threshold 2 --cb-success-threshold 2 "
        "--cb-timeout-duration-secs 3 --cb-window-duration-secs 10 --disable-retries "
        "--rate-limit-tokens-per-second -1 --worker-startup-timeout-secs 30 "
        "--worker-startup-check-interval 1 --worker-startup-check-interval 2 --enable-igw "
        "--disable-health-check --model-path org/m --tokenizer-path t --reasoning-parser qwen3 "
        "--prometheus-duration-buckets 1 2 3 --log-level warn"
    )
    assert main_router(arguments.split()) == 0
    (startup,) = started
    config = startup.effective_config(Config())
    routing = config.routing
    assert (routing.max_total_retries, routing.max_worker_retries) == (1, 2)
    assert (config.health.probe_healthy, config.health.startup_timeout_secs) == (False, 30)
    without_effect = [line.partition(" has no effect here: ")[0] for line in startup.warnings]
    assert without_effect == [
        "--retry-initial-backoff-ms", "--retry-max-backoff-ms", "--retry-backoff-multiplier",
        "--retry-jitter-factor", "--cb-success-threshold", "--cb-timeout-duration-secs",
        "--cb-window-duration-secs", "--rate-limit-tokens-per-second",
        "--worker-startup-check-interval", "--enable-igw", "--model-path", "--tokenizer-path", "--reasoning-parser",
        "--prometheus-duration-buckets",
    ]  # fmt: skip


def test_a_switch_overrides_a_number_in_either_order(started):
    switch, number = ["--disable-retries"], ["--retry-max-retries", "5"]
    assert main_router(switch + number) == main_router(number + switch) == 0
    retries = [run.effective_config(Config()).routing.max_total_retries for run in started]
    assert retries == [1, 1]


def test_flags_of_other_routers_set_the_equivalent_keys(started):
    arguments = (
        "--shutdown-grace-period-secs 7 --sse-keepalive-secs 8 --max-idle-secs 9 --sticky-sessions "
        "--disable-circuit-breaker --log-json --header-read-timeout-secs 6 "
        "--cors-allowed-origins https://a.test https://b.test "
        "--prefix-hash-load-factor 2 --cache-match-threshold 0.4 --policy least_load"
    )
    assert main_router(arguments.split()) == 0
    config = started[0].effective_config(Config())
    assert (config.server.drain_timeout_secs, config.server.sse_keepalive_secs) == (7, 8)
    assert (config.routing.sticky_idle_secs, config.routing.sticky_sessions) == (9, True)
    assert (config.routing.max_worker_retries, config.server.log_format) == (0, "json")
    assert config.server.timeouts.client_head_secs == 6
    assert config.server.cors_allow_origins == ("https://a.test", "https://b.test")
    assert config.routing.prefix_hash.load_factor == 2
    assert config.routing.cache_aware.cache_threshold == 0.4
    assert config.routing.policy == "least_request"
    assert started[0].warnings == ()


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ("--prometheus-port 4000", "127.0.0.1:4000"),
        ("--prometheus-host 0.0.0.0", "0.0.0.0:29000"),
        ("--prometheus-host ::1 --prometheus-port 0", "[::1]:0"),
        ("--prometheus-host [::1] --prometheus-port 4000", "[::1]:4000"),
    ],
)
def test_metrics_get_their_own_listener(started, arguments, address):
    main_router(arguments.split())
    assert started[0].effective_config(Config()).admin.metrics_listen == address


def test_flags_for_keys_ids_and_logs_exist_in_every_command(started, monkeypatch):
    arguments = (
        "--api-key k3y --request-id-headers x-a x-b --log-dir logs --routing-key-headers X-R"
    )
    main_router(arguments.split())
    monkeypatch.setattr(serve, "start", lambda startup: started.append(startup) or 0)
    assert serve.main([*arguments.split(), "--enable-igw", "--worker-urls", "http://a:1"]) == 0
    for startup in started:
        config = startup.effective_config(Config())
        server = config.server
        assert config.routing.session_headers == ("x-r",)
        assert (server.api_key, server.log_file) == ("k3y", "logs/omni-proxy.log")
        assert server.request_id_headers == ("x-a", "x-b")
    assert len(started[1].warnings) == 1


def test_with_an_engine_the_flags_for_keys_and_logs_are_the_engines(started):
    arguments = (
        "--engine vllm --model-path org/m --api-key engine --router-api-key ours --log-dir d"
    )
    main(arguments.split())
    config = started[0].effective_config(Config())
    assert (config.server.api_key, config.server.log_file) == ("ours", "off")
    assert config.launch[0].command[-4:] == ("--api-key", "engine", "--log-dir", "d")


@pytest.mark.parametrize(
    ("name", "policy", "sticky"),
    [
        ("consistent_hash", "consistent_hashing", False),
        ("passthrough", "round_robin", False),
        ("manual", "least_request", True),
        ("sticky_least_loaded", "least_request", True),
    ],
)
def test_other_names_of_policies_are_accepted(started, name, policy, sticky):
    main_router(["--policy", name])
    routing = started[0].effective_config(Config()).routing
    assert (routing.policy, routing.sticky_sessions) == (policy, sticky)


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ("--dp-aware", "auto"),
        ("--intra-node-data-parallel-size 8", 8),
        ("--worker-urls http://a@0 http://a@1", 2),
        ("--worker-urls http://a@0 http://a@1 --dp-aware", "auto"),
    ],
)
def test_flags_for_data_parallel_ranks_are_accepted(started, arguments, ranks):
    main_router(arguments.split())
    assert started[0].effective_config(Config()).routing.ranks == ranks


def test_with_an_engine_the_routers_flags_have_a_prefix(started):
    arguments = (
        "--engine sglang --model-path org/m --router-disable-retries --router-cb-success-threshold "
        "2 --router-worker-startup-timeout-secs 60 --tokenizer-path t --reasoning-parser qwen3"
    )
    assert main(arguments.split()) == 0
    (startup,) = started
    assert startup.effective_config(Config()).routing.max_total_retries == 1
    assert [line.split()[0] for line in startup.warnings] == ["--router-cb-success-threshold"]
    (entry,) = startup.launch
    assert entry.ready_timeout_secs == 60
    assert entry.command[-4:] == ("--tokenizer-path", "t", "--reasoning-parser", "qwen3")


@pytest.mark.parametrize(
    "arguments",
    [
        "--mini-lb",
        "--history-backend redis",
        "--dp-minimum-tokens-scheduler",
    ],
)
def test_an_unsupported_flag_is_refused_with_an_alternative(started, capsys, arguments):
    with pytest.raises(SystemExit) as exited:
        main_router(arguments.split())
    assert exited.value.code == 2
    output = capsys.readouterr().err
    for flag in (word for word in arguments.split() if word.startswith("--")):
        assert explain_missing_flag(flag) in output
    assert "did you mean" not in output
    assert output.startswith("usage: omni-proxy launch-router")
    assert len(output.splitlines()) == 3


def test_flags_are_explained_by_prefix():
    assert (
        explain_missing_flag("--postgres-pool-max")
        == explain_missing_flag("--history-backend")
        != ""
    )
    assert (
        explain_missing_flag("--router-service-discovery")
        == explain_missing_flag("--router-selector")
        != ""
    )
    assert explain_missing_flag("--port") == explain_missing_flag("--decodes") == ""


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [
        ("--prot", "--port"),
        ("--worker-url", "--worker-urls"),
        ("--max_tree_size", "--max-tree-size"),
        ("--health-timeout-secs", "--health-check-timeout-secs"),
        ("--mini-lb", ""),
        ("--tokenizer-path", ""),
        ("--worker-startup-delay", ""),
        ("--worker-startup-timeout-secs", ""),
        ("--zzz", ""),
    ],
)
def test_only_a_similar_flag_is_suggested(flag, suggestion):
    known = [
        name
        for name in flags_of(router_parser()) - set(WITHOUT_EFFECT)
        if not name.startswith("--worker-startup")
    ]
    assert nearest_flag(flag, known) == suggestion


def test_flags_without_effect_are_not_in_the_help(capsys):
    for parser in (router_parser(), launch_parser(tuple(ENGINES))):
        with pytest.raises(SystemExit):
            parser.parse_args(["--help"])
        output = capsys.readouterr().out
        assert "==SUPPRESS==" not in output
        assert "jitter" not in output


def test_each_warning_is_logged(started, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # no journal of another program
    main_router(["--enable-igw", "--port", "0"])
    monkeypatch.setattr(server.trio, "run", lambda run: 0)
    monkeypatch.setattr(server, "configure", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        assert server.run(started[0]) == 0
    assert [record.message for record in caplog.records] == list(started[0].warnings)


@pytest.mark.parametrize("flag", [*WITHOUT_EFFECT, *MISSING, *VALUED, *LISTS, *SWITCHES, *JOINED])
def test_the_migration_page_has_the_flag(flag):
    name = f"{flag}…" if flag.endswith("-") else flag
    assert f"`{name}`" in MIGRATION


REASONS = [*((name, reason) for name, (reason, _) in WITHOUT_EFFECT.items()), *MISSING.items()]


@pytest.mark.parametrize(("flag", "reason"), REASONS, ids=[name for name, _ in REASONS])
def test_the_migration_page_gives_the_same_reason(flag, reason):
    name = f"{flag}…" if flag.endswith("-") else flag
    rows = [line for line in MIGRATION.splitlines() if f"`{name}`" in line.split(" | ")[0]]
    assert [row for row in rows if row.endswith(f"| {reason} |")], rows
