import subprocess

import pytest

from omni_proxy.cli import COMMANDS, main
from omni_proxy.cli.completion import pages
from omni_proxy.cli.shells import SHELLS, Flag, Page

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _omni_proxy
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("bash") / "omni-proxy"
    path.write_text(SHELLS["bash"](pages()))
    return path


@pytest.fixture
def complete(script):
    def ask(*words):
        command = ["bash", "-euc", ASK, "bash", script, "omni-proxy", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return ask


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], ["status"]),
        (["status", "--al"], ["--all"]),
        (["--worker-u"], ["--worker-urls"]),
        (["workers", "d"], ["disable", "drain"]),
        (["workers", "drain", "--w"], ["--wait"]),
        (["weights", "pause", "--mode", "r"], ["retract"]),
        (["weights", "status", "--mo"], []),
        (["weights", "r"], ["resolve", "rollback"]),
        (["weights", "rollback", "--y"], ["--yes"]),
        (["workers", "--url", "http", ":", "//h", ":", "1", "--json", "drain", "--w"], ["--wait"]),
        (["weights", "--api-key", "pause", "rollback", "--y"], ["--yes"]),
        (["weights", "--api-key", "k", "r"], ["resolve", "rollback"]),
        (["workers", "--mo"], ["--model"]),
        (["weights", "--client-"], ["--client-cert", "--client-key"]),
        (["workers", "--api-key", ""], []),
        (["top", "--client-"], ["--client-cert", "--client-key"]),
        (["completion", ""], ["bash", "fish", "zsh", "-h", "--help"]),
        (["status", "--url", ""], []),
        (["launch", "--engine", "ll"], ["llamacpp"]),
        (["--policy", "p"], ["power_of_two", "prefix_hash"]),
        (["launch-router", "--policy", "c"], ["cache_aware", "consistent_hashing"]),
        (["--log-level", "w"], ["warning"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(complete, words, offered):
    assert complete(*words) == offered


def test_bash_completes_files_where_files_belong(complete, tmp_path):
    (tmp_path / "proxy.toml").touch()
    for words in (
        ["check"], ["--config"], ["status", "--config"], ["explain"], ["top", "--ca"],
        ["workers", "--config"], ["weights", "--json", "pause", "--config"],
    ):  # fmt: skip
        assert complete(*words, f"{tmp_path}/pro") == [f"{tmp_path}/proxy.toml"], words


def test_every_command_and_every_flag_of_its_parser_is_there():
    known = {page.name: page for page in pages()}
    assert COMMANDS.keys() <= known.keys() & set(known[""].words) | {""}
    assert {"--follow", "-f", "--lines"} <= {n for f in known["logs"].flags for n in f.names}
    assert {"list", "drain", "revive"} <= set(known["workers"].words)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_its_script(shell, capsys):
    assert main(["completion", shell]) == 0
    told = capsys.readouterr().out
    assert "weights pause" in told
    with pytest.raises(SystemExit) as caught:
        main(["completion", "csh"])
    assert caught.value.code == 2


@pytest.mark.parametrize("shell", SHELLS)
def test_quotes_in_a_help_text_do_not_end_a_word(shell):
    page = Page("", "it's", (Flag(("--a",), "it's $HOME `x`", takes=True, choices=("b'c",)),))
    told = SHELLS[shell]([page, Page("it's", "", ()), Page("it's so", "", ())])
    assert "b'\\''c" in told
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=told, text=True, check=False).returncode == 0
