import io
import json
import sys
from hashlib import sha256

import pytest

from omni_proxy.cli.config_file.keys import main

CONFIG = """
[server]
api_key = "server-key"
[[keys]]
name = "team-a"
key_env = "TEAM_A_KEY"
models = ["m"]
requests_per_minute = 60
[[admin.keys]]
name = "grafana"
key_sha256 = "{digest}"
"""


def digest_of(key):
    return sha256(key.encode()).hexdigest()


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words, key=""):
        stdin = io.TextIOWrapper(io.BytesIO(key.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        status = main(words)
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_A_KEY", "team-key")
    file = tmp_path / "proxy.toml"
    file.write_text(CONFIG.format(digest=digest_of("read-key")))
    return str(file)


def test_a_new_key_comes_with_its_hash_and_no_two_are_alike(run):
    made = [json.loads(run("new", "--json")[1]) for _ in range(2)]
    assert made[0]["key"] != made[1]["key"]
    for each in made:
        assert each["key_sha256"] == digest_of(each["key"])
        assert len(each["key"]) >= 40
    lines = dict(line.split() for line in run("new")[1].splitlines())
    assert lines["key_sha256"] == digest_of(lines["key"])


@pytest.mark.parametrize("key", ["team-key", "team-key\n", " team-key\r\n"])
def test_the_hash_is_that_of_the_key_on_stdin(run, key):
    assert run("hash", key=key) == (0, digest_of("team-key") + "\n", "")


@pytest.mark.parametrize("key", ["", "\n", "two keys"])
def test_stdin_without_one_key_is_a_usage_error_that_does_not_repeat_it(run, key):
    status, out, err = run("hash", key=key)
    assert (status, out) == (2, "")
    assert "stdin holds" in err
    assert "two keys" not in err


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("team-key", "[[keys]] team-a: models m; no limit of requests in flight; 60 requests per "),
        ("read-key", "[[admin.keys]] grafana: role read"),
        ("server-key", "[server] api_key: all model routes; no limits"),
    ],
)
def test_the_owner_of_a_key_is_shown_with_what_it_may_do(run, config, key, owner):
    status, out, _ = run("check", "--config", config, key=key)
    assert status == 0
    assert out.startswith(owner)
    assert key not in out
    body = json.loads(run("check", "--config", config, "--json", key=key)[1])
    assert body["owners"][0]["table"] == owner.split()[0]


def test_a_key_of_nobody_is_status_1(run, config):
    status, out, err = run("check", "--config", config, key="other")
    assert (status, out) == (1, "")
    assert "nobody has this key" in err


def test_a_configuration_that_is_refused_is_status_2(run, config, monkeypatch):
    monkeypatch.delenv("TEAM_A_KEY")
    status, _, err = run("check", "--config", config, key="team-key")
    assert status == 2
    assert "keys[0].key_env: names an environment variable that is not set" in err
