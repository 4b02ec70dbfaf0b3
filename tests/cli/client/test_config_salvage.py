import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cli import main
from omni_proxy.cli.client.admin_client import AdminClientError
from omni_proxy.cli.client.config_salvage import salvage_config
from omni_proxy.config.parse import ConfigError, parse
from tests.cli.feeds import feed, row

GOOD = """
[server]
host = "10.0.0.7"
port = 8123
[admin]
api_key = "sesame"
[routing]
policy = "random"
"""
BROKEN = {
    "an unknown key": GOOD + "polcy = 3\n",
    "a wrong value": GOOD.replace('"random"', '"rand"'),
    "an unknown key of the same table": GOOD.replace("[admin]", "prt = 3\n[admin]"),
    "a value of the wrong type in the same table": GOOD.replace(
        "[admin]", 'queue_size = "x"\n[admin]'
    ),
    "invalid TOML": GOOD + "policy = = 3\n",
    "an unterminated string": GOOD + 'model = "half\n',
    "an unterminated list": GOOD + "retry_on = [\n",
    "an invalid line of the same table": GOOD.replace("[admin]", "queue_size 3\n[admin]"),
    "a table twice": GOOD + "[server]\n",
    "keys with such names in another table": GOOD + "[[launch]]\nhost = 3\nport = = 1\n",
    "a table's name in quotes": GOOD.replace("[server]", '["server"]') + "[[[\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_the_address_is_read_from_a_file_with_another_error(target_of, tmp_path, capsys, text):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    target = target_of("--config", file)
    assert (target.url, target.key) == ("http://10.0.0.7:8123", "sesame")
    output = capsys.readouterr().err
    assert re.fullmatch(
        rf"warning: {re.escape(str(file))}.*: .*; the running proxy keeps its configuration\n",
        output,
    )


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("8123", "81 23"),
        GOOD.replace("8123", "812300"),
        GOOD.replace('"10.0.0.7"', "7"),
        GOOD.replace('"sesame"', '"ses'),
        "[admin]\nlisten = 'nowhere'\n",
        "server.port = = 1\n",
        "server = 3\n",
        "[server\nport = 8123\n",
        "[sever]\nport = 8123\n",
        "port = 8123\n",
        "server = { port = 8123 }\n[[[\n",
        '[server]\n"port" = 8123\n[[[\n',
        "[server]\nport\n= 8123\n",
        "[Admin]\nlisten = '127.0.0.1:8123'\n[[[\n",
    ],
)
def test_the_address_is_never_guessed(target_of, tmp_path, text):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    with pytest.raises(AdminClientError, match="--url URL"):
        target_of("--config", file)


def test_a_missing_file_is_reported(target_of, tmp_path):
    with pytest.raises(AdminClientError, match="cannot be read"):
        target_of("--config", tmp_path / "none.toml")


@given(st.text(max_size=200), st.integers(0, len(GOOD)))
def test_any_insertion_into_a_file_is_accepted_or_refused(insertion, offset):
    raw = (GOOD[:offset] + insertion + GOOD[offset:]).encode("utf-8", "surrogatepass")
    with contextlib.suppress(ConfigError):
        parse(raw)
        return
    refusal = ConfigError([], "f")
    try:
        salvage_config(raw, refusal)
    except ConfigError as error:
        raised = error
    else:
        raised = refusal
    assert raised is refusal


@pytest.mark.parametrize("command", [["status"], ["workers", "list"], ["weights", "status"]])
def test_commands_work_while_the_file_is_broken(proxy, tmp_path, capsys, command):
    port = proxy.url.rpartition(":")[2]
    file = tmp_path / "proxy.toml"
    file.write_text(f"[server]\nport = {port}\n[routing]\npolcy = 3\n")
    proxy.replies["/feed"] = (200, feed(row("a:1")))
    proxy.replies["/workers"] = (200, {"workers": []})
    proxy.replies["/weights"] = (200, {
        "operation": None, "waiting": [], "weight_epoch": 0, "weight_version": None,
        "workers": [], "uncertain": {}, "journal": {"error": None}, "history": [],
    })  # fmt: skip
    assert main([*command, "--config", str(file)]) == 0
    output = capsys.readouterr().err
    assert output.count("warning: ") == 1
    assert "routing.polcy: unknown key" in output


def test_with_a_broken_file_logs_reads_the_log_of_the_running_proxy(proxy, tmp_path, capsys):
    log = tmp_path / "access.log"
    log.write_text("a line\n")
    port = proxy.url.rpartition(":")[2]
    file = tmp_path / "proxy.toml"
    file.write_text(f"[server]\nport = {port}\naccess_log = 3\n")
    proxy.replies["/config"] = (200, {"config": {"server": {"access_log": str(log)}}})
    assert main(["logs", "--raw", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "a line\n"
