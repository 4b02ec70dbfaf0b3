import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.configuration_flags import (
    FLAGS,
    Startup,
    apply_flags,
    parse_worker_urls,
    ranks_in_urls,
)
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config


def test_a_flag_has_precedence_over_the_file():
    config = parse("server.port = 1\nserver.host = 'h'\nhealth.interval_secs = 2")
    merged = apply_flags(config, {"server.port": "8000", "health.interval_secs": "0.5"})
    assert (merged.server.port, merged.server.host) == (8000, "h")
    assert merged.health.interval_secs == 0.5


def test_an_ipv6_address_may_have_brackets():
    assert apply_flags(Config(), {"server.host": "[::1]"}).server.host == "::1"


def test_values_of_flags_may_be_texts_or_parsed_values():
    assert apply_flags(Config(), {"server.port": 8000}).server.port == 8000
    assert apply_flags(Config(), {"server.host": "10"}).server.host == "10"
    sized = apply_flags(Config(), {"server.max_payload_size": "2MiB"})
    assert sized.server.max_payload_size == 2 * 1024**2


@given(st.data())
def test_without_flags_the_configuration_is_unchanged(configs, data):
    config = data.draw(configs)
    assert apply_flags(config, {}) == config


@pytest.mark.parametrize(
    ("flag", "text", "problem"),
    [
        ("--port", "http", "expected a whole number, got a string"),
        ("--port", "70000", "must be at most 65535, got 70000"),
        ("--port", "1.5", "expected a whole number, got a number with a fraction"),
        ("--host", "", "must not be empty"),
        ("--host", "[h]", '"[h]" has no IPv6 address in its brackets'),
        ("--host", "[::1]:80", '"[::1]:80" is more than an address'),
        ("--request-timeout-secs", "nan", "must be at least 0, got nan"),
        ("--max-payload-size", "3MX", '"3MX" is not a size'),
        ("--health-check-endpoint", "h", "must be a path"),
        ("--health-failure-threshold", "0", "must be at least 1, got 0"),
        ("--policy", "randm", "did you mean `random`?"),
        ("--policy", "cache-aware", "did you mean `cache_aware`?"),
        ("--log-level", "loud", "is not one of"),
    ],
)
def test_an_invalid_flag_is_reported_with_its_reason(flag, text, problem):
    with pytest.raises(ConfigError) as caught:
        apply_flags(Config(), {FLAGS[flag]: text})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"command line: {flag}: ")
    assert problem in line


def test_all_invalid_flags_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        apply_flags(Config(), {"server.port": "x", "routing.policy": "x"})
    assert len(caught.value.problems) == 2


def test_worker_urls_are_normalized():
    assert parse_worker_urls(["HTTP://A/", "http://b:1"]) == ("http://a", "http://b:1")


def test_every_invalid_worker_url_is_reported():
    texts = ["http://a", "http://A/", "a:1", "unix:/w", "http://169.254.169.254"]
    with pytest.raises(ConfigError) as caught:
        parse_worker_urls(texts)
    lines = [str(problem) for problem in caught.value.problems]
    assert [line.split(": ")[2] for line in lines] == [f'"{text}"' for text in texts[1:]]
    assert "is named twice" in lines[0]


def test_the_admin_key_is_that_of_the_flag_the_file_or_the_environment():
    without_key, with_key = Config(), parse("admin.api_key = 'file'")
    environment = Startup(config_path=None, overrides={}, flag_urls=(), admin_key="environment")
    flag = Startup(
        config_path=None,
        overrides={"admin.api_key": "flag"},
        flag_urls=(),
        admin_key="environment",
    )
    assert [start.effective_config(without_key).admin.api_key for start in (flag, environment)] == [
        "flag",
        "environment",
    ]
    assert [start.effective_config(with_key).admin.api_key for start in (flag, environment)] == [
        "flag",
        "file",
    ]
    assert Startup(None, {}, (), "").effective_config(without_key) == without_key


def test_urls_of_the_ranks_of_one_engine_are_one_worker():
    texts = ["http://a:1@0", "http://A:1/@1", "http://b@1", "http://b@0"]
    assert parse_worker_urls(texts) == ("http://a:1", "http://b")
    assert ranks_in_urls(texts) == 2
    assert ranks_in_urls(["http://a:1", "http://b"]) is None


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["http://a@0", "http://a@0"], "is named twice"),
        (["http://a", "http://a@0"], "is named twice"),
        (["http://a@0", "http://a"], "is named twice"),
        (["http://user@b:1"], "must not contain user-info"),
        (["http://a@-1"], "must not contain user-info"),
        (["http://a@99999"], "must not contain user-info"),
        (["@0"], "scheme must be"),
    ],
)
def test_a_duplicate_or_invalid_rank_in_a_url_is_refused(texts, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_worker_urls(texts)


@pytest.mark.parametrize(
    "texts",
    [["http://a@1"], ["http://a@0", "http://b"], ["http://a@0", "http://a@1", "http://b@0"]],
)
def test_urls_without_some_of_the_ranks_are_refused(texts):
    with pytest.raises(ConfigError, match="are not all named"):
        ranks_in_urls(texts)
