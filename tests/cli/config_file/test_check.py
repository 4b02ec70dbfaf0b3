import json

import pytest

from omni_proxy.cli import main

VALID = """
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


def test_a_valid_file_is_summarized(file, capsys):
    file.write_text(VALID)
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{file}: ok; 1 worker named, 2 replicas launched, policy random, "
        "listens on 127.0.0.1 port 30000\n"
    )


def test_a_refused_file_is_reported_line_by_line(file, capsys):
    file.write_text("server.prot = 1\n[[workers]]\nurl = 'h'\n")
    assert main(["check", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"{file}:1: server.prot: unknown key; did you mean `port`?",
        f"{file}:3: workers[0].url: scheme must be http or https, as in http://HOST:PORT",
        "refused: 2 problems",
    ]


def test_the_json_output_has_the_same_problems(file, capsys):
    file.write_text(VALID)
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
    for args in (["check", str(file)], ["--config", str(file)]):
        assert main(args) == 2
        output = capsys.readouterr().err
        assert f'{file}: workers[0].url: "http://localhost:30000" is an address of this' in output


def test_a_missing_file_is_reported_with_a_similar_name(tmp_path, capsys):
    (tmp_path / "proxy.toml").write_text("")
    (tmp_path / "proxy.tml.log").write_text("")
    assert main(["check", str(tmp_path / "proxy.tml")]) == 2
    output = capsys.readouterr().err
    assert "cannot be read: No such file or directory; did you mean `proxy.toml`?" in output
    assert main(["check", str(tmp_path / "other")]) == 2
    assert "did you mean" not in capsys.readouterr().err


ALIAS = """\
[[routing.models]]
name = "gpt"
targets = [{ model = "big" }, { model = "small" }, { model = "tuned" }]
"""


@pytest.mark.parametrize(
    ("tables", "noted"),
    [
        ('[[workers]]\nurl = "http://a:1"\nmodel = "big"\nloras = ["tuned"]\n', ["small"]),
        ('[[launch]]\nname = "l"\ncommand = ["x"]\nmodel = "small"\n', ["big", "tuned"]),
        ('[[workers]]\nurl = "http://a:1"\nmodel = "big"\nloras = "auto"\n', []),
        ('[[workers]]\nurl = "http://a:1"\n', []),
        ("", []),
    ],
)
def test_an_alias_target_that_no_worker_has_is_noted(tmp_path, capsys, tables, noted):
    file = tmp_path / "proxy.toml"
    file.write_text(ALIAS + tables)
    assert main(["check", str(file)]) == 0
    printed = capsys.readouterr().err
    assert printed.count("note: ") == len(noted)
    for model in noted:
        index = ["big", "small", "tuned"].index(model)
        path = f"routing.models[0].targets[{index}].model"
        assert f"{path}: no worker of this file has the model {model!r}" in printed


def test_an_unreadable_key_is_refused_and_a_missing_variable_is_noted(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("GRAFANA_KEY", raising=False)
    file, key_file = tmp_path / "proxy.toml", tmp_path / "key"
    entry = '[[admin.keys]]\nname = "{}"\n'
    file.write_text(
        f'{entry.format("a")}key_env = "GRAFANA_KEY"\n{entry.format("b")}key_file = "{key_file}"\n'
    )
    assert main(["check", str(file)]) == 2
    assert "admin.keys[1].key_file: cannot be read" in capsys.readouterr().err
    key_file.write_text("k1")
    assert main(["check", str(file)]) == 0
    assert "admin.keys[0].key_env: GRAFANA_KEY is not set here" in capsys.readouterr().err
    assert main(["check", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1
    monkeypatch.setenv("GRAFANA_KEY", "k1")
    assert main(["check", str(file)]) == 2
    assert "has the same key as another entry" in capsys.readouterr().err
    monkeypatch.setenv("GRAFANA_KEY", "k0")
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_workers_that_no_request_with_a_model_can_reach_are_noted(file, capsys):
    tables = '[[discover]]\nmodel_label = "m"\n[[discover]]\nname = "more"\n'
    file.write_text(
        f'[[workers]]\nurl = "http://a"\nmodel = "m"\n[[workers]]\nurl = "http://b"\n{tables}'
    )
    assert main(["check", str(file)]) == 0
    captured = capsys.readouterr()
    reason = "has no model: it gets no request that names a model, because other workers have one"
    assert captured.err.splitlines() == [
        f"{file}: note: workers[1]: {reason}", f"{file}: note: discover[1]: {reason}",
    ]  # fmt: skip
    assert "2 workers named, 2 sources of discovery, 0 replicas launched" in captured.out
    file.write_text(f'[routing]\nmodel = "x"\n[[workers]]\nurl = "http://a"\nmodel = "m"\n{tables}')
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().err == ""


def test_certificates_of_discovery_are_read(file, capsys, tmp_path):
    table = '[[discover]]\napi_server = "https://k"\nnamespace = "n"\n'
    file.write_text(
        f'{table}ca_file = "{tmp_path}/ca"\nclient_cert = "{tmp_path}/c"\nclient_key = "k"\n'
    )
    assert main(["check", str(file)]) == 2
    output = capsys.readouterr().err
    assert f"discover[0].ca_file: {tmp_path}/ca cannot be read" in output
    assert f"discover[0].client_cert: {tmp_path}/c cannot be read" in output
