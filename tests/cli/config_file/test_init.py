"""The file that `omni-proxy init` writes, from flags, from answers and from nothing."""

import json
import re
import sys
import tomllib
from itertools import pairwise

import jsonschema_rs
import pytest

from omni_proxy.cli import main
from omni_proxy.cli.config_file import init
from omni_proxy.cli.config_file.schema import schema_text
from omni_proxy.config.parse import parse

URLS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


@pytest.fixture
def answers(monkeypatch):
    """What a person on a terminal types; the questions that were asked come back."""

    def give(*typed):
        asked, left = [], list(typed)

        def answer(question):
            asked.append(question)
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr(init, "_ask", answer)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        return asked

    return give


def is_clean(file, capsys):
    capsys.readouterr()
    assert main(["check", str(file)]) == 0, capsys.readouterr().err
    table = tomllib.loads(file.read_text())
    return jsonschema_rs.Draft7Validator(json.loads(schema_text())).is_valid(table)


def test_flags_are_enough_and_check_finds_the_file_clean(file, capsys):
    words = ["--worker-urls", *URLS, "--policy", "least_request", "--port", "8080"]
    assert main(["init", str(file), *words]) == 0
    assert "omni-proxy --config" in capsys.readouterr().out
    assert is_clean(file, capsys)
    config = parse(file.read_text())
    assert tuple(worker.url for worker in config.workers) == URLS
    assert (config.routing.policy, config.server.port) == ("least_request", 8080)
    assert (config.server.host, config.admin.keys) == ("127.0.0.1", ())


def test_without_any_answer_it_has_no_workers_and_says_how_to_add_one(file, capsys):
    assert main(["init", str(file), "--no-input"]) == 0
    assert "omni-proxy workers add" in capsys.readouterr().out
    assert is_clean(file, capsys)
    assert parse(file.read_text()).workers == ()


def test_every_key_has_a_comment_and_no_line_is_long(file):
    main(["init", str(file), "--worker-urls", *URLS, "--host", "0.0.0.0"])
    lines = file.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    for before, line in pairwise(lines):
        if re.match(r"(# )?[a-z_]+ = [^#]*$", line):
            assert before.startswith("# "), line


def test_beyond_this_machine_there_is_an_admin_key_unless_none_is_wanted(file, capsys):
    assert main(["init", str(file), "--host", "0.0.0.0"]) == 0
    assert "export OMNI_ADMIN_KEY=" in capsys.readouterr().out
    (key,) = parse(file.read_text()).admin.keys
    assert (key.key_env, key.role) == ("OMNI_ADMIN_KEY", "all")
    assert main(["init", str(file), "--force", "--host", "::", "--admin-key-env", ""]) == 0
    assert parse(file.read_text()).admin.keys == ()


def test_it_asks_for_what_no_flag_sets(file, answers, capsys):
    asked = answers("http://a:1, http://b:2", "", "0.0.0.0", "", "-", "MY_KEY")
    assert main(["init", str(file)]) == 0
    assert len(asked) == 6
    assert is_clean(file, capsys)
    config = parse(file.read_text())
    assert [worker.url for worker in config.workers] == ["http://a:1", "http://b:2"]
    assert (config.server.access_log, config.routing.policy) == ("-", "cache_aware")
    assert config.admin.keys[0].key_env == "MY_KEY"
    again = answers("")
    assert main(["init", str(file), "--force", "--worker-urls", "http://a:1", "--policy", "random",
                 "--port", "1", "--access-log", "off"]) == 0  # fmt: skip
    assert ["address to listen on" in question for question in again] == [True]


def test_an_invalid_answer_is_asked_for_again_with_the_reason(file, answers, capsys):
    asked = answers("ftp://a", "http://a:1", "cash_aware", "", "", "99999", "1", "")
    assert main(["init", str(file)]) == 0
    assert len(asked) == 8
    output = capsys.readouterr().err
    assert "99999" in output
    assert "cash_aware" in output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--worker-urls", "http://a:1", "http://a:1"], "duplicate worker URL"),
        (["--worker-urls", "http://127.0.0.1:30000"], "workers[0].url"),
        (["--port", "x"], "server.port"),
        (["--policy", "cash_aware"], "did you mean"),
    ],
)
def test_what_check_would_refuse_is_not_written(file, capsys, words, reason):
    assert main(["init", str(file), *words]) == 2
    assert reason in capsys.readouterr().err
    assert list(file.parent.iterdir()) == []


def test_a_file_that_exists_stays(file, capsys):
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_terminal_that_closes_leaves_nothing(file, answers, capsys):
    answers("http://a:1")
    assert main(["init", str(file)]) == 2
    assert "nothing is written" in capsys.readouterr().err
    assert not file.exists()


def test_a_value_cannot_leave_its_string(file, capsys):
    odd = 'a"\nport = 1\\#é'
    assert main(["init", str(file), "--access-log", odd]) == 0
    assert parse(file.read_text()).server.access_log == odd


def test_the_schema_is_written_beside_it_and_named_in_the_first_line(file, capsys):
    assert main(["init", str(file), "--schema"]) == 0
    assert file.read_text().splitlines()[0] == "#:schema ./omni-proxy.schema.json"
    assert (file.parent / "omni-proxy.schema.json").read_text() == schema_text()
    assert is_clean(file, capsys)


def test_a_hyphen_is_stdout(capsys):
    assert main(["init", "-", "--worker-urls", "http://a:1"]) == 0
    assert parse(capsys.readouterr().out).workers[0].url == "http://a:1"
