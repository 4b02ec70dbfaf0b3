"""The file that `omni-proxy init` writes, from flags, from answers or without either."""

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
    """A function that answers the questions of `init` on a terminal, and returns the questions."""

    def give(*typed):
        questions, remaining = [], list(typed)

        def answer(question):
            questions.append(question)
            if not remaining:
                raise EOFError
            return remaining.pop(0)

        monkeypatch.setattr(init, "_ask", answer)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        return questions

    return give


def is_clean(file, capsys):
    capsys.readouterr()
    assert main(["check", str(file)]) == 0, capsys.readouterr().err
    table = tomllib.loads(file.read_text())
    return jsonschema_rs.Draft7Validator(json.loads(schema_text())).is_valid(table)


def test_a_file_from_flags_passes_the_check(file, capsys):
    flags = ["--worker-urls", *URLS, "--policy", "least_request", "--port", "8080"]
    assert main(["init", str(file), *flags]) == 0
    assert "omni-proxy --config" in capsys.readouterr().out
    assert is_clean(file, capsys)
    config = parse(file.read_text())
    assert tuple(worker.url for worker in config.workers) == URLS
    assert (config.routing.policy, config.server.port) == ("least_request", 8080)
    assert (config.server.host, config.admin.keys) == ("127.0.0.1", ())


def test_without_input_the_file_has_no_workers_and_a_hint_how_to_add_one(file, capsys):
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


def test_a_file_for_a_public_address_has_an_admin_key_unless_it_is_declined(file, capsys):
    assert main(["init", str(file), "--host", "0.0.0.0"]) == 0
    assert "export OMNI_ADMIN_KEY=" in capsys.readouterr().out
    (key,) = parse(file.read_text()).admin.keys
    assert (key.key_env, key.role) == ("OMNI_ADMIN_KEY", "all")
    assert main(["init", str(file), "--force", "--host", "::", "--admin-key-env", ""]) == 0
    assert parse(file.read_text()).admin.keys == ()


def test_init_asks_for_settings_without_a_flag(file, answers, capsys):
    questions = answers("http://a:1, http://b:2", "", "0.0.0.0", "", "-", "MY_KEY")
    assert main(["init", str(file)]) == 0
    assert len(questions) == 6
    assert is_clean(file, capsys)
    config = parse(file.read_text())
    assert [worker.url for worker in config.workers] == ["http://a:1", "http://b:2"]
    assert (config.server.access_log, config.routing.policy) == ("-", "cache_aware")
    assert config.admin.keys[0].key_env == "MY_KEY"
    again = answers("")
    assert main(["init", str(file), "--force", "--worker-urls", "http://a:1", "--policy", "random",
                 "--port", "1", "--access-log", "off"]) == 0  # fmt: skip
    assert ["address to listen on" in question for question in again] == [True]


def test_after_an_invalid_answer_the_question_is_repeated_with_the_reason(file, answers, capsys):
    questions = answers("ftp://a", "http://a:1", "cash_aware", "", "", "99999", "1", "")
    assert main(["init", str(file)]) == 0
    assert len(questions) == 8
    output = capsys.readouterr().err
    assert "99999" in output
    assert "cash_aware" in output


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--worker-urls", "http://a:1", "http://a:1"], "duplicate worker URL"),
        (["--worker-urls", "http://127.0.0.1:30000"], "workers[0].url"),
        (["--port", "x"], "server.port"),
        (["--policy", "cash_aware"], "did you mean"),
    ],
)
def test_a_file_that_the_check_would_refuse_is_not_written(file, capsys, flags, reason):
    assert main(["init", str(file), *flags]) == 2
    assert reason in capsys.readouterr().err
    assert list(file.parent.iterdir()) == []


def test_an_existing_file_is_not_overwritten(file, capsys):
    file.write_text("existing")
    assert main(["init", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == "existing"


def test_if_the_terminal_closes_nothing_is_written(file, answers, capsys):
    answers("http://a:1")
    assert main(["init", str(file)]) == 2
    assert "nothing is written" in capsys.readouterr().err
    assert not file.exists()


def test_a_value_with_quotes_and_newlines_is_escaped(file, capsys):
    odd = 'a"\nport = 1\\#é'
    assert main(["init", str(file), "--access-log", odd]) == 0
    assert parse(file.read_text()).server.access_log == odd


def test_the_schema_is_written_to_the_same_folder_and_named_in_the_first_line(file, capsys):
    assert main(["init", str(file), "--schema"]) == 0
    assert file.read_text().splitlines()[0] == "#:schema ./omni-proxy.schema.json"
    assert (file.parent / "omni-proxy.schema.json").read_text() == schema_text()
    assert is_clean(file, capsys)


def test_a_hyphen_writes_to_stdout(capsys):
    assert main(["init", "-", "--worker-urls", "http://a:1"]) == 0
    assert parse(capsys.readouterr().out).workers[0].url == "http://a:1"
