from contextlib import suppress

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config import fields
from omni_proxy.config.fields import CAPABILITIES, POLICIES
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config

WORKER = '[[workers]]\nurl = "http://a"\n'
LAUNCH = '[[launch]]\ncommand = ["run"]\n'


def problems_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "proxy.toml")
    return [str(problem) for problem in caught.value.problems]


def test_an_empty_file_is_the_built_in_configuration():
    assert parse("") == Config()


@given(st.data())
def test_a_rendered_configuration_parses_to_itself(configs, data):
    config = data.draw(configs)
    assert parse(tomli_w.dumps(msgspec.to_builtins(config))) == config


def test_all_problems_of_a_file_are_reported_in_the_order_of_lines():
    text = """\
[server]
prot = 1
port = "80"
[servr]
[routing]
policy = "leastrequest"
[[workers]]
url = "http://a/v1"
capabilities = ["chatt"]
[[workers]]
"""
    assert problems_of(text) == [
        "proxy.toml:2: server.prot: unknown key; did you mean `port`?",
        "proxy.toml:3: server.port: expected a whole number, got a string",
        "proxy.toml:4: servr: unknown key; did you mean `server`?",
        'proxy.toml:6: routing.policy: "leastrequest" is not one of '
        f"{', '.join(sorted(POLICIES))}; did you mean `least_request`?",
        "proxy.toml:8: workers[0].url: must be a base URL without a path",
        'proxy.toml:9: workers[0].capabilities[0]: "chatt" is not one of audio_input, '
        "audio_output, chat, image_input, speech, streaming, video_input; did you mean `chat`?",
        "proxy.toml:10: workers[1].url: is missing",
    ]


@pytest.mark.parametrize("value", ['"429"', "429.0", "true", "500"])
def test_a_choice_of_numbers_accepts_only_those_numbers(value):
    assert parse("server.overload_status = 429").server.overload_status == 429
    (problem,) = problems_of(f"server.overload_status = {value}")
    assert f": server.overload_status: {value} is not one of 429, 503" in problem


def test_an_error_has_the_same_content_as_data():
    with pytest.raises(ConfigError) as caught:
        parse("server.prot = 1", "proxy.toml")
    assert caught.value.as_dict() == {
        "file": "proxy.toml",
        "problems": [
            {
                "path": "server.prot",
                "line": 1,
                "reason": "unknown key",
                "hint": "did you mean `port`?",
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = ", "proxy.toml:1: not TOML: invalid value (at end of document)"),
        ("\n\na = [1\n", "proxy.toml:4: not TOML: unclosed array (at end of document)"),
        ("[a]\nb = 1\nb = 2\n", "proxy.toml:3: not TOML: cannot overwrite a value (at line 3, "),
        (b"a = 1\n# \xff\n", "proxy.toml:2: byte 0xff is not UTF-8"),
        ("a = " + "9" * 9999, "proxy.toml: not TOML: exceeds the limit"),
        ("a = " + "[" * 9999, "proxy.toml: not TOML: nested too deeply"),
    ],
)
def test_invalid_toml_is_refused_with_its_line(text, problem):
    (line,) = problems_of(text)
    assert line.startswith(problem)


def test_a_byte_order_mark_is_ignored():
    assert parse(b"\xef\xbb\xbf[server]\nport = 1\n").server.port == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server.port = true", "expected a whole number, got a boolean"),
        ("server.port = 1.5", "expected a whole number, got a number with a fraction"),
        ("server.port = []", "expected a whole number, got a list"),
        ("server.port = 1979-05-27", "expected a whole number, got a date or time"),
        ("server.host = 1", "expected a string, got a whole number"),
        ("server.request_timeout_secs = '1'", "expected a number, got a string"),
        ("server.request_timeout_secs = true", "expected a number, got a boolean"),
        ("server = 1", "expected a table, got a whole number"),
        ("server.timeouts = 1", "expected a table, got a whole number"),
        (WORKER + "disabled = 1", "expected true or false, got a whole number"),
        (WORKER + "capabilities = 'chat'", "expected a list, got a string; write it in [ ]"),
        ("[workers]\nurl = 'http://a'", "expected a list, got a table; write [[workers]]"),
        ("workers = [1]", "workers[0]: expected a table, got a whole number"),
        (LAUNCH + "env = 1", "expected a table, got a whole number"),
        (LAUNCH + "env.A = 1", "launch[0].env.A: expected a string, got a whole number"),
        (LAUNCH + 'env."a b" = 1', 'launch[0].env."a b": expected a string'),
        ("server.log_level = 3", "3 is not one of critical, debug, error, info, warning"),
        ("server.half_close = true", "true is not one of abort, answer"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_expected_type(text, problem):
    (line,) = problems_of(text)
    assert problem in line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server.port = -1", "must be at least 0, got -1"),
        ("server.port = 65536", "must be at most 65535, got 65536"),
        ("server.host = ''", "must not be empty"),
        ('server.host = "a\\u0000"', "must not contain a NUL"),
        ("server.max_inflight = -1", "must be at least 0"),
        ("server.max_payload_size = 0", "must be at least 1"),
        ("server.request_timeout_secs = -0.1", "must be at least 0"),
        ("server.request_timeout_secs = nan", "must be at least 0, got nan"),
        ("server.request_timeout_secs = inf", "must be at most"),
        ("server.timeouts.idle_secs = -1", "must be at least 0"),
        ("health.interval_secs = 0", "must be above 0, got 0"),
        ("health.timeout_secs = 0", "must be above 0"),
        ("health.failure_threshold = 0", "must be at least 1"),
        ("health.endpoint = 'health'", 'must be a path: begin with "/"'),
        ("health.endpoint = '/h?x'", "must be a path"),
        (WORKER + "max_inflight = -1", "must be at least 0"),
        (WORKER + "weight = 0", "must be at least 1"),
        (WORKER + "capabilities = []", "must not be empty"),
        (LAUNCH + "base_port = 0", "must be at least 1"),
        (LAUNCH + "replicas = -1", "must be at least 0"),
        (LAUNCH + "base_port = 65535\nreplicas = 2", "the last replica would need port 65536"),
        (LAUNCH + "host = 'a b'", "spaces or control"),
        (LAUNCH + "host = '169.254.1.1'", "link-local"),
        (LAUNCH + "env.'A=B' = ''", "is not the name of an environment variable"),
        ("[[launch]]\ncommand = []", "must not be empty"),
        ("[[launch]]\ncommand = ['', 'x']", "has no program"),
        ("[[launch]]\n", "launch[0].command: is missing"),
    ],
)
def test_a_value_out_of_range_is_refused(text, problem):
    (line,) = problems_of(text)
    assert problem in line


def test_a_policy_that_needs_stored_versions_needs_a_mode_that_stores_them():
    text = 'weight_sync = {{ mode = "{}", on_failure = "{}" }}'
    for mode in ("off", "coordinate"):
        for policy in ("rollback", "forward"):
            (line,) = problems_of(text.format(mode, policy))
            assert f'"{policy}" needs stored versions' in line
        parse(text.format(mode, "quarantine"))
    for mode in ("receive", "both"):
        assert parse(text.format(mode, "rollback")).weight_sync.mode == mode


def test_a_certificate_requires_its_key():
    assert any("needs tls_key" in line for line in problems_of("server.tls_cert = 'a'"))
    assert any("needs tls_cert" in line for line in problems_of("server.tls_key = 'a'"))
    assert any("needs grpc_tls_key" in line for line in problems_of("picker.grpc_tls_cert = 'a'"))
    assert any(
        "needs grpc_tls_cert" in line for line in problems_of("picker.grpc_tls_client_ca = 'a'")
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("65_536", 65536),
        ("'64MiB'", 64 * 1024**2),
        ("'64 mib'", 64 * 1024**2),
        ("'1.5KiB'", 1536),
        ("'2GiB'", 2 * 1024**3),
        ("'3kB'", 3000),
        ("'3MB'", 3_000_000),
        ("'1GB'", 10**9),
        ("'77'", 77),
    ],
)
def test_a_size_is_in_bytes_or_has_a_unit(text, size):
    assert parse(f"server.max_payload_size = {text}").server.max_payload_size == size


@pytest.mark.parametrize("text", ["64MX", "MiB", "", "-1MiB", "0.3KiB", "1.0001B", "1e3"])
def test_an_invalid_size_is_refused(text):
    (line,) = problems_of(f"admin.max_body_bytes = '{text}'")
    assert "admin.max_body_bytes" in line


def test_durations_may_be_integers_or_fractions():
    timeouts = parse("server.timeouts = {connect_secs = 3, idle_secs = 0.25}").server.timeouts
    assert (timeouts.connect_secs, timeouts.idle_secs) == (3.0, 0.25)
    assert isinstance(timeouts.connect_secs, float)


def test_a_worker_needs_only_a_url():
    (worker,) = parse('[[workers]]\nurl = " HTTP://Host:1/ "').workers
    assert worker.url == "http://host:1"
    assert worker.capabilities == CAPABILITIES
    assert (worker.model, worker.disabled, worker.weight, worker.max_inflight) == ("", False, 1, 0)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_have_brackets(host):
    config = parse(f"{LAUNCH}host = '{host}'\n[server]\nhost = '{host}'")
    assert config.server.host == config.launch[0].host == "::1"
    assert config.launch[0].urls == ("http://[::1]:31000",)


@pytest.mark.parametrize("host", ["[::1", "[]", "[127.0.0.1]", "[h]"])
def test_brackets_hold_an_ipv6_address_and_nothing_else(host):
    reason = f'"{host}" has no IPv6 address in its brackets'
    assert problems_of(f"[server]\nhost = '{host}'") == [f"proxy.toml:2: server.host: {reason}"]
    assert problems_of(f"{LAUNCH}host = '{host}'") == [f"proxy.toml:3: launch[0].host: {reason}"]


def test_brackets_of_an_admin_listener_hold_an_ipv6_address_only():
    parse("[admin]\nlisten = '[fe80::1%eth0]:9'")
    (line,) = problems_of("[admin]\nlisten = '[1.2.3.4]:9'")
    assert line.endswith('"[1.2.3.4]" has no IPv6 address in its brackets')


def test_a_file_may_name_a_worker_on_a_unix_socket():
    assert parse('[[workers]]\nurl = "unix:/run/w"').workers[0].url == "unix:/run/w"


def test_duplicate_workers_are_refused_after_normalization():
    assert problems_of(WORKER + '[[workers]]\nurl = "HTTP://A/"') == [
        "proxy.toml:4: workers[1].url: duplicate worker URL http://a; workers[0].url has it already"
    ]


def test_a_worker_that_is_also_launched_is_refused():
    lines = problems_of('[[workers]]\nurl = "http://127.0.0.1:31001"\n' + LAUNCH + "replicas = 2")
    assert lines == [
        "proxy.toml:3: launch[0].base_port: duplicate worker URL http://127.0.0.1:31001; "
        "workers[0].url has it already"
    ]


def test_launch_groups_must_not_share_a_name_or_a_port():
    lines = problems_of(LAUNCH + LAUNCH)
    assert len(lines) == 2
    assert "launch[1].name: duplicate group name local" in lines[0] + lines[1]
    assert "duplicate worker URL http://127.0.0.1:31000" in lines[0] + lines[1]


def test_another_problem_does_not_hide_a_duplicate():
    lines = problems_of(
        "workers = [1, {url = 'http://a'}, {url = 'x'}, {url = 'http://a', modl = 1}]"
    )
    assert len(lines) == 4
    assert any("workers[3].url: duplicate" in line for line in lines)


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_accepted_or_refused(text):
    with suppress(ConfigError):
        assert isinstance(parse(text), Config)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("routing.cache_aware.cache_threshold = 1.1", "must be at most 1, got 1.1"),
        ("routing.cache_aware.balance_rel_threshold = 0.9", "must be at least 1, got 0.9"),
        ("routing.cache_aware.eviction_interval_secs = 0", "must be above 0, got 0"),
        ("routing.cache_aware.max_tree_size = 0", "must be at least 1, got 0"),
        ("routing.cache_aware.fallback = 'smallest'", "did you mean `smallest_tree`?"),
        ("routing.cache_aware.holders = 'any'", '"any" is not one of all, longest'),
        ("routing.cache_aware.spill = 'choosen'", "did you mean `chosen`?"),
        ("routing.cache_aware.warmup_share = -0.1", "must be at least 0, got -0.1"),
        ("routing.prefix_hash.load_factor = 0.5", "must be at least 1, got 0.5"),
        ("routing.prefix_hash.prefix_length = 0", "must be at least 1, got 0"),
        ("routing.sticky_sessions = 'yes'", "expected true or false, got a string"),
        ("routing.sticky_idle_secs = -1", "must be at least 0, got -1"),
        ("routing.sticky_max = 0", "must be at least 1, got 0"),
        ("routing.sticky_max = 100000000", "must be at most 10000000"),
    ],
)
def test_invalid_settings_of_policies_are_refused(line, reason):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert reason in str(caught.value)


def test_policies_and_their_keys_are_parsed():
    config = parse(
        "[routing]\npolicy = 'cache_aware'\nsticky_sessions = true\nsticky_max = 5\n"
        "[routing.cache_aware]\nholders = 'longest'\nspill = 'chosen'\nwarmup_share = 0\n"
        "[[workers]]\nurl = 'http://a'\nweight = 7"
    )
    rules = config.routing.cache_aware
    assert (rules.holders, rules.spill, rules.warmup_share) == ("longest", "chosen", 0.0)
    assert (config.routing.sticky_max, config.workers[0].weight) == (5, 7)
    for name in ("consistent_hashing", "prefix_hash"):
        assert parse(f"routing.policy = '{name}'").routing.policy == name


def test_a_policy_may_be_a_class_path_or_an_installed_name(monkeypatch):
    assert parse("routing.policy = 'a.b_2:C'").routing.policy == "a.b_2:C"
    monkeypatch.setattr(fields, "installed_policies", lambda: ["packing"])
    assert parse("routing.policy = 'packing'").routing.policy == "packing"
    with pytest.raises(ConfigError, match=r"did you mean `packing`\?"):
        parse("routing.policy = 'paking'")


@pytest.mark.parametrize("path", [":C", "a:", "a b:C", "a.b:C:D", "a..b:C", "1a:C", "a:C()"])
def test_an_invalid_class_path_is_refused(path):
    with pytest.raises(ConfigError, match="is not a class path; write it as"):
        parse(f"routing.policy = '{path}'")


def test_an_unknown_policy_is_refused_with_the_alternatives():
    with pytest.raises(ConfigError, match="an entry point of omni_proxy"):
        parse("routing.policy = 'zzz'")
