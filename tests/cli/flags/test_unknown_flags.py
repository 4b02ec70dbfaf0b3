import re
from pathlib import Path

import pytest

from omni_proxy.cli.flags.command_parser import THEIRS
from omni_proxy.cli.flags.engine_commands import ENGINES
from omni_proxy.cli.flags.start_parsers import launch_parser, router_parser, serve_parser
from omni_proxy.config.configuration_flags import FLAGS

MIGRATION = (Path(__file__).parents[3] / "docs/migration.md").read_text()
PARSERS = (serve_parser(), router_parser(), launch_parser(tuple(ENGINES)))


def error_lines(capsys, parser, *args):
    with pytest.raises(SystemExit) as exited:
        parser.parse_args(args)
    assert exited.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].splitlines()


def test_a_similar_flag_is_suggested(capsys):
    lines = error_lines(capsys, serve_parser(), "--prot", "8080")
    assert lines == ["unrecognized arguments: --prot 8080", "  --prot: did you mean `--port`?"]


def test_an_argument_that_is_not_similar_to_a_flag_gets_no_suggestion(capsys):
    lines = error_lines(capsys, router_parser(), "--zzz", "extra")
    assert lines == ["unrecognized arguments: --zzz extra"]


@pytest.mark.parametrize("flag", THEIRS)
def test_a_flag_of_another_router_is_reported_with_its_equivalent(capsys, flag):
    for args in ([flag, "3"], [f"{flag}=3"]):
        lines = error_lines(capsys, router_parser(), *args)
        assert lines[1:] == [f"  {flag}: use {THEIRS[flag]} (docs/migration.md)"]


def test_no_own_flag_is_in_the_table_of_other_routers():
    own = {
        name for parser in PARSERS for action in parser._actions for name in action.option_strings
    }
    assert not own & set(THEIRS)


def test_hints_for_flags_of_other_routers_name_existing_flags():
    flags = {name for hint in THEIRS.values() for name in re.findall(r"--[a-z-]+", hint)}
    assert flags <= {*FLAGS, "--engine"}


def test_the_migration_page_has_the_flag():
    assert [
        flag for flag in THEIRS if f"{flag}`" not in MIGRATION and f"{flag} " not in MIGRATION
    ] == []
