import contextlib
import io
import json
import re
import sys
from hashlib import sha256

import pytest

from omni_proxy.cli import keys
from omni_proxy.cli.keys import main
from omni_proxy.config.parse import parse

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


def test_a_new_key_with_a_name_is_printed_with_its_entry(capsys, tmp_path):
    flags = ("--max-inflight", "4", "--tokens-per-minute", "9", "--priority", "-5")
    assert main(["new", "--name", "team-b", *flags, "--models", 'a"b', "m:é"]) == 0
    out = capsys.readouterr().out
    key, entry = re.search(r"(omni-\S+)\n.*?(\[\[keys\]\].*)", out, re.DOTALL).groups()
    assert keys.FIRST_KEY_WARNING in out
    (caller,) = parse(entry).keys
    assert (caller.name, caller.max_inflight, caller.tokens_per_minute) == ("team-b", 4, 9)
    assert caller.key_sha256 == digest_of(key)
    assert (caller.models, caller.priority) == (('a"b', "m:é"), -5)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-inflight", "4"), "--name"),
        (("--name", 'a"b'), "letters"),
        (("--name", "a", "--max-inflight", "0"), "from 1 on"),
        (("--name", "a", "--priority", "1001"), "-1000 to 1000"),
        (("--priority", "1"), "--name"),
    ],
)
def test_an_invalid_entry_is_not_printed(capsys, flags, text):
    with contextlib.suppress(SystemExit):
        assert main(["new", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, text in err) == ("", True)


CALLER = {
    "name": "team-a", "models": [], "max_inflight": 5, "requests_per_minute": 60,
    "tokens_per_minute": 0, "priority": 0, "in_flight": 2, "requests": 7, "input_tokens": 80,
    "output_tokens": 9, "refused": {"max_inflight": 3, "models": 0},
}  # fmt: skip


def test_usage_prints_a_table_of_callers(proxy, capsys):
    proxy.replies["/keys"] = (200, {"keys": [CALLER], "refused_without_key": 0, "error": None})
    assert main(["usage", "--url", proxy.url]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == list(keys._USAGE)
    assert line.split() == [
        "team-a",
        "2",
        "of",
        "5",
        "7",
        "80",
        "9",
        "60",
        "-",
        "max_inflight",
        "3",
    ]
    refused = {"refused_without_key": 9, "refused_without_key_last_minute": 2}
    proxy.replies["/keys"] = (200, {"keys": [], **refused})
    assert main(["usage", "--url", proxy.url]) == 0
    none, keyless = capsys.readouterr().out.splitlines()
    assert "no callers" in none
    assert keyless.endswith("9 refused (401) since the start, 2 in the last minute")
    assert main(["usage", "--url", "http://127.0.0.1:1"]) == 2


def test_a_caller_is_added_with_the_hash_of_a_new_key(proxy, capsys):
    proxy.replies["/keys"] = (200, {"status": "ok", "name": "team-a", "key_required": True})
    proxy.replies["/feed"] = (200, {"key_required": False})
    assert main(["add", "team-a", "--max-inflight", "4", "--url", proxy.url]) == 0
    out = capsys.readouterr().out
    key = re.search(r"^omni-\S+$", out, re.MULTILINE)[0]
    requests = str(proxy.requests)
    assert (digest_of(key) in requests, key in requests) == (True, False)
    assert "answer 401" in out
    proxy.replies["/keys/team%2Fa"] = (
        200,
        {"status": "ok", "name": "team/a", "key_required": False},
    )
    assert main(["remove", "team/a", "--url", proxy.url]) == 0
    assert "open to everyone" in capsys.readouterr().out
    proxy.replies["/keys"] = (409, {"error": {"message": "caller team-a already exists"}})
    assert main(["add", "team-a", "--url", proxy.url]) == 2
    assert capsys.readouterr().err == "omni-proxy keys: caller team-a already exists\n"


def digest_of(key):
    return sha256(key.encode()).hexdigest()


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*args, key=""):
        stdin = io.TextIOWrapper(io.BytesIO(key.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        status = main(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_A_KEY", "team-key")
    file = tmp_path / "proxy.toml"
    file.write_text(CONFIG.format(digest=digest_of("read-key")))
    return str(file)


def test_a_new_key_is_random_and_printed_with_its_hash(run):
    new_keys = [json.loads(run("new", "--json")[1]) for _ in range(2)]
    assert new_keys[0]["key"] != new_keys[1]["key"]
    for new_key in new_keys:
        assert new_key["key_sha256"] == digest_of(new_key["key"])
        assert len(new_key["key"]) >= 40
    lines = dict(line.split() for line in run("new")[1].splitlines())
    assert lines["key_sha256"] == digest_of(lines["key"])


@pytest.mark.parametrize("key", ["team-key", "team-key\n", " team-key\r\n"])
def test_the_hash_is_that_of_the_key_on_stdin(run, key):
    assert run("hash", key=key) == (0, digest_of("team-key") + "\n", "")


@pytest.mark.parametrize("key", ["", "\n", "two keys"])
def test_an_invalid_key_on_stdin_is_a_usage_error_that_does_not_repeat_it(run, key):
    status, out, err = run("hash", key=key)
    assert (status, out) == (2, "")
    assert "stdin contains" in err
    assert "two keys" not in err


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("team-key", "[[keys]] team-a: models m; no limit of requests in flight; 60 requests per "),
        ("read-key", "[[admin.keys]] grafana: role read"),
        ("server-key", "[server] api_key: all model routes; no limits"),
    ],
)
def test_the_owner_of_a_key_is_shown_with_its_limits(run, config, key, owner):
    status, out, _ = run("check", "--config", config, key=key)
    assert status == 0
    assert out.startswith(owner)
    assert key not in out
    body = json.loads(run("check", "--config", config, "--json", key=key)[1])
    assert body["owners"][0]["table"] == owner.split()[0]
    assert body["owners"][0]["may"] == body["owners"][0]["permissions"]  # the old name


def test_an_unknown_key_is_status_1(run, config):
    status, out, err = run("check", "--config", config, key="other")
    assert (status, out) == (1, "")
    assert "no entry has this key" in err


def test_a_refused_configuration_is_status_2(run, config, monkeypatch):
    monkeypatch.delenv("TEAM_A_KEY")
    status, _, err = run("check", "--config", config, key="team-key")
    assert status == 2
    assert "keys[0].key_env: names an environment variable that is not set" in err
