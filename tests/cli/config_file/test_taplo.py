"""The `#:schema` line works with taplo, the program that some editors run."""

import subprocess
import sys
from pathlib import Path

import pytest

from omni_proxy.cli import main
from omni_proxy.cli.config_file.init import SCHEMA_FILE
from omni_proxy.cli.config_file.schema import schema_text
from tests.config.test_example import TEXT, WHOLE

TAPLO = Path(sys.executable).parent / "taplo"
LINE = f"#:schema ./{SCHEMA_FILE}\n"


@pytest.fixture
def lint(tmp_path):
    (tmp_path / SCHEMA_FILE).write_text(schema_text())

    def run(file):
        command = [TAPLO, "lint", "--no-auto-config", file.name]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("text", [TEXT, WHOLE], ids=["example", "whole"])
def test_a_valid_file_passes(text, tmp_path, lint):
    file = tmp_path / "proxy.toml"
    file.write_text(LINE + text)
    result = lint(file)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[routing]\npolcy = 'random'\n", "'polcy' was unexpected"),
        ("[server]\nport = '1'\n", 'is not of type "integer"'),
        ("[server]\nhalf_close = 'maybe'\n", '"abort"'),
    ],
)
def test_an_error_is_reported(text, reason, tmp_path, lint):
    file = tmp_path / "proxy.toml"
    file.write_text(LINE + text)
    result = lint(file)
    assert result.returncode == 1
    assert reason in result.stderr


def test_a_file_that_init_writes_passes(tmp_path, lint, capsys):
    file = tmp_path / "proxy.toml"
    assert main(["init", str(file), "--schema", "--worker-urls", "http://a:1"]) == 0
    result = lint(file)
    assert result.returncode == 0, result.stderr
    assert main(["check", str(file)]) == 0
    assert "ok" in capsys.readouterr().out


def test_pyproject_toml_is_formatted():
    root = Path(__file__).parents[3]
    command = [TAPLO, "fmt", "--check", "pyproject.toml"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
