import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cli import main
from omni_proxy.cli.client.admin_client import AdminClientError, salvage_config
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
    "a value of the wrong type beside": GOOD.replace("[admin]", 'queue_size = "x"\n[admin]'),
    "no TOML": GOOD + "policy = = 3\n",
    "a string without its end": GOOD + 'model = "half\n',
    "a list without its end": GOOD + "retry_on = [\n",
    "a line of the same table that is none": GOOD.replace("[admin]", "queue_size 3\n[admin]"),
    "a table twice": GOOD + "[server]\n",
    "keys of other tables that have such names": GOOD + "[[launch]]\nhost = 3\nport = = 1\n",
    "a table's name in quotes": GOOD.replace("[server]", '["server"]') + "[[[\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_with_another_error_still_gives_the_address(place, tmp_path, capsys, text):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    found = place("--config", file)
    assert (found.url, found.key) == ("http://10.0.0.7:8123", "sesame")
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
def test_where_it_is_is_never_guessed(place, tmp_path, text):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    with pytest.raises(AdminClientError, match="--url URL"):
        place("--config", file)


def test_a_file_that_is_not_there_is_reported(place, tmp_path):
    with pytest.raises(AdminClientError, match="cannot be read"):
        place("--config", tmp_path / "none.toml")


@given(st.text(max_size=200), st.integers(0, len(GOOD)))
def test_whatever_is_put_into_a_file_it_is_taken_or_refused(more, at):
    raw = (GOOD[:at] + more + GOOD[at:]).encode("utf-8", "surrogatepass")
    with contextlib.suppress(ConfigError):
        parse(raw)
        return
    refusal = ConfigError([], "f")
    try:
        salvage_config(raw, refusal)
    except ConfigError as raised:
        again = raised
    else:
        again = refusal
    assert again is refusal


@pytest.mark.parametrize("command", [["status"], ["workers", "list"], ["weights", "status"]])
def test_commands_work_while_the_file_is_broken(proxy, tmp_path, capsys, command):
    port = proxy.url.rpartition(":")[2]
    file = tmp_path / "proxy.toml"
    file.write_text(f"[server]\nport = {port}\n[routing]\npolcy = 3\n")
    proxy.says["/feed"] = (200, feed(row("a:1")))
    proxy.says["/workers"] = (200, {"workers": []})
    proxy.says["/weights"] = (200, {
        "operation": None, "waiting": [], "weight_epoch": 0, "weight_version": None,
        "workers": [], "uncertain": {}, "journal": {"error": None}, "history": [],
    })  # fmt: skip
    assert main([*command, "--config", str(file)]) == 0
    output = capsys.readouterr().err
    assert output.count("warning: ") == 1
    assert "routing.polcy: unknown key" in output


def test_logs_of_a_broken_file_are_those_of_the_running_proxy(proxy, tmp_path, capsys):
    log = tmp_path / "access.log"
    log.write_text("a line\n")
    port = proxy.url.rpartition(":")[2]
    file = tmp_path / "proxy.toml"
    file.write_text(f"[server]\nport = {port}\naccess_log = 3\n")
    proxy.says["/config"] = (200, {"config": {"server": {"access_log": str(log)}}})
    assert main(["logs", "--raw", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "a line\n"
