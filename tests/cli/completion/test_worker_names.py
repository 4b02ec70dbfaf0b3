import subprocess

import pytest

from omni_proxy.cli import main
from tests.program_forkserver import program_interpreter

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
