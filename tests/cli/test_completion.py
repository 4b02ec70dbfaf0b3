import subprocess

import pytest

from omni_proxy.cli import COMMANDS, main
from omni_proxy.cli.completion import SHELLS, Flag, Page, pages
from tests.program_forkserver import program_interpreter

COMPLETE = """
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
    def run(*args):
        command = ["bash", "-euc", COMPLETE, "bash", script, "omni-proxy", *args]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.split()

    return run


@pytest.mark.parametrize(
    ("args", "completions"),
    [
        (["st"], ["status"]),
        (["status", "--al"], ["--all"]),
        (["--worker-u"], ["--worker-urls"]),
        (["workers", "d"], ["disable", "drain"]),
        (["workers", "drain", "--w"], ["--wait"]),
        (["weights", "pause", "--mode", "r"], ["retract"]),
        (["weights", "status", "--mo"], []),
        (["weights", "r"], ["resolve", "rollback", "rollout"]),
        (["weights", "rollback", "--y"], ["--yes"]),
        (["workers", "--url", "http", ":", "//h", ":", "1", "--json", "drain", "--w"], ["--wait"]),
        (["weights", "--api-key", "pause", "rollback", "--y"], ["--yes"]),
        (["weights", "--api-key", "k", "r"], ["resolve", "rollback", "rollout"]),
        (["workers", "--mo"], ["--model"]),
        (["weights", "--client-"], ["--client-cert", "--client-key"]),
        (["workers", "--api-key", ""], []),
        (["top", "--client-"], ["--client-cert", "--client-key"]),
        (["completion", ""], ["bash", "fish", "zsh", "-h", "--help"]),
        (["status", "--url", ""], []),
        (["launch", "--engine", "ll"], ["llamacpp"]),
        (["--policy", "p"], ["power_of_two", "prefix_hash"]),
        (["--prefill-policy", "p"], ["power_of_two", "prefix_hash"]),
        (["serve", "--decode-policy", "ro"], ["round_robin"]),
        (["--kv-connector", "n"], ["nixl"]),
        (["bench", "--workload", "ch"], ["chats"]),
        (["launch-router", "--policy", "c"], ["cache_aware", "consistent_hashing"]),
        (["--log-level", "w"], ["warning"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(complete, args, completions):
    assert complete(*args) == completions


def test_bash_completes_files_where_a_file_is_expected(complete, tmp_path):
    (tmp_path / "proxy.toml").touch()
    for args in (
        ["check"], ["--config"], ["status", "--config"], ["explain"], ["top", "--ca"],
        ["workers", "--config"], ["weights", "--json", "pause", "--config"],
    ):  # fmt: skip
        assert complete(*args, f"{tmp_path}/pro") == [f"{tmp_path}/proxy.toml"], args


def test_pages_have_every_command_and_its_flags():
    known = {page.name: page for page in pages()}
    assert COMMANDS.keys() <= known.keys() & set(known[""].words) | {""}
    assert {"--follow", "-f", "--lines"} <= {n for f in known["logs"].flags for n in f.names}
    assert {"list", "drain", "revive"} <= set(known["workers"].words)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    output = capsys.readouterr().out
    assert "weights pause" in output
    with pytest.raises(SystemExit) as exited:
        main(["completion", "csh"])
    assert exited.value.code == 2


@pytest.mark.parametrize("shell", SHELLS)
def test_quotes_in_a_help_text_do_not_end_a_word(shell):
    page = Page("", "it's", (Flag(("--a",), "it's $HOME `x`", takes=True, choices=("b'c",)),))
    script = SHELLS[shell]([page, Page("it's", "", ()), Page("it's so", "", ())])
    assert "b'\\''c" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


COMPLETE_LINE = """
source "$1"; program=$2 COMP_WORDBREAKS=$4
COMP_LINE=$3 COMP_POINT=${#COMP_LINE}
split=${COMP_LINE//:/ : }
read -ra COMP_WORDS <<< "$split"; [[ $split == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); _omni_proxy "$program"
printf '%s\\n' "${COMPREPLY[@]}"
"""
FLEET = [
    {"id": f"http%3A%2F%2F{name}", "display_id": name, "url": f"http://{name}"}
    for name in ("10.0.0.1:8000", "10.0.0.12:8000", "gpu-1:8000", "x;reboot:1")
]


@pytest.fixture
def complete_line(script, tmp_path):
    program = tmp_path / "omni-proxy"
    program.write_text(f'#!/bin/sh\nexec "{program_interpreter()}" -m omni_proxy "$@"\n')
    program.chmod(0o755)

    def run(line, breaks=' :"='):
        command = ["bash", "-euc", COMPLETE_LINE, "bash", script, program, line, breaks]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.split()

    return run


def test_bash_completes_workers_of_the_proxy_on_the_line(proxy, complete_line, tmp_path):
    proxy.replies["/workers"] = (200, {"workers": FLEET})
    file = tmp_path / "proxy.toml"
    file.write_text(f"[server]\nport = {proxy.url.rpartition(':')[2]}\n")
    drain = f"omni-proxy workers drain --url {proxy.url}"
    assert complete_line(f"{drain} ") == ["10.0.0.1:8000", "10.0.0.12:8000", "gpu-1:8000"]
    assert complete_line(f"omni-proxy workers --config {file} enable g") == ["gpu-1:8000"]
    # Bash replaces only the text after the last colon.
    assert complete_line(f"{drain} 10.0.0.1:80") == ["8000"]
    assert complete_line(f"{drain} 10.0.0.1:80", breaks=" ") == ["10.0.0.1:8000"]
    assert complete_line(f"{drain} http://g") == ["//gpu-1:8000"]
    assert complete_line(f"{drain} gpu-1:8000 10.0.0.12:8000 ") == ["10.0.0.1:8000"]


@pytest.mark.parametrize(
    "line",
    [
        "workers drain --url 127.0.0.1:9 h", "workers drain 'h",
        "workers remove --url a --config b h",
        "workers revive --config /nowhere/proxy.toml h", "workers drain --url http://[ h", "drain",
        "workers drain --url", "",
    ],
)  # fmt: skip
def test_completion_prints_nothing_without_a_reachable_proxy(line, capfd):
    assert main(["__complete", f"omni-proxy {line}"]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "reply", [(403, {"error": {"code": "admin_key_required"}}), (200, {}), (200, b"no JSON")]
)
def test_completion_prints_nothing_without_workers(proxy, reply, capfd):
    proxy.replies["/workers"] = reply
    assert main(["__complete", f"omni-proxy workers drain --url {proxy.url} "]) == 0
    assert capfd.readouterr() == ("", "")
