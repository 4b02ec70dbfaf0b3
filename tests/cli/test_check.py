import json

import pytest

from omni_proxy.cli import main

FINE = """
routing.policy = "random"
[[workers]]
url = "http://a"
[[launch]]
command = ["run"]
replicas = 2
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


def test_a_fine_file_is_summed_up(file, capsys):
    file.write_text(FINE)
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{file}: ok; 1 worker named, 2 replicas launched, policy random, "
        "listens on 127.0.0.1 port 30000\n"
    )


def test_a_refused_file_is_reported_line_by_line(file, capsys):
    file.write_text("server.prot = 1\n[[workers]]\nurl = 'h'\n")
    assert main(["check", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"{file}:1: server.prot: unknown key; did you mean `port`?",
        f"{file}:3: workers[0].url: scheme must be http or https, as in http://HOST:PORT",
        "refused: 2 problems",
    ]


def test_a_machine_reads_the_same(file, capsys):
    file.write_text(FINE)
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "file": str(file), "problems": []}
    file.write_text("server.prot = 1")
    assert main(["check", "--json", str(file)]) == 2
    problem = {
        "path": "server.prot",
        "line": 1,
        "reason": "unknown key",
        "hint": "did you mean `port`?",
    }
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "file": str(file),
        "problems": [problem],
    }


def test_a_file_that_cannot_be_read_is_refused(file, capsys):
    assert main(["check", "--json", str(file)]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["reason"] == "cannot be read: No such file or directory"


def test_a_worker_that_is_the_proxy_itself_is_refused(file, capsys):
    file.write_text('[server]\nport = 30000\n[[workers]]\nurl = "http://localhost:30000"\n')
    for words in (["check", str(file)], ["--config", str(file)]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f'{file}: workers[0].url: "http://localhost:30000" is an address of this' in told


def test_a_file_that_is_missing_brings_the_nearest_name(tmp_path, capsys):
    (tmp_path / "proxy.toml").write_text("")
    (tmp_path / "proxy.tml.log").write_text("")
    assert main(["check", str(tmp_path / "proxy.tml")]) == 2
    told = capsys.readouterr().err
    assert "cannot be read: No such file or directory; did you mean `proxy.toml`?" in told
    assert main(["check", str(tmp_path / "other")]) == 2
    assert "did you mean" not in capsys.readouterr().err
