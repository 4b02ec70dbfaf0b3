import pytest

from omni_proxy.cli.flags.command_parser import CommandParser


@pytest.mark.parametrize("command", [[], ["sub"]])
def test_abbreviated_flags_are_refused_in_commands_and_subcommands(command, capsys):
    parser = CommandParser(prog="p")
    parser.add_argument("--verbose", action="store_true")
    parser.add_subparsers().add_parser("sub").add_argument("--verbose", action="store_true")
    with pytest.raises(SystemExit):
        parser.parse_args([*command, "--verb"])
    assert "--verb" in capsys.readouterr().err


def test_help_wraps_texts_except_those_with_line_breaks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = CommandParser(prog="p", description="word " * 20, epilog="a\n   b").format_help()
    assert max(map(len, text.splitlines())) <= 40
    assert text.endswith("a\n   b\n")
