import re
from pathlib import Path

import pytest

from omni_proxy.cli.flags.arguments import launch_parser, router_parser, serve_parser
from omni_proxy.cli.flags.command_parser import THEIRS
from omni_proxy.cli.flags.engines import ENGINES
from omni_proxy.config.flags import FLAGS

MIGRATION = (Path(__file__).parents[3] / "docs/migration.md").read_text()
PARSERS = (serve_parser(), router_parser(), launch_parser(tuple(ENGINES)))


def refused(capsys, parser, *words):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].splitlines()


def test_a_near_miss_is_reported_the_flag_that_was_meant(capsys):
    output = refused(capsys, serve_parser(), "--prot", "8080")
    assert output == ["unrecognized arguments: --prot 8080", "  --prot: did you mean `--port`?"]


def test_a_word_that_resembles_nothing_gets_no_advice(capsys):
    output = refused(capsys, router_parser(), "--zzz", "extra")
    assert output == ["unrecognized arguments: --zzz extra"]


@pytest.mark.parametrize("flag", THEIRS)
def test_another_routers_flag_is_reported_by_what_is_here_with_its_value_or_without(capsys, flag):
    for words in ([flag, "3"], [f"{flag}=3"]):
        output = refused(capsys, router_parser(), *words)
        assert output[1:] == [f"  {flag}: use {THEIRS[flag]} (docs/migration.md)"]


def test_no_flag_of_ours_is_called_a_strangers():
    ours = {name for each in PARSERS for action in each._actions for name in action.option_strings}
    assert not ours & set(THEIRS)


def test_hints_for_flags_of_other_routers_name_existing_flags():
    named = {name for output in THEIRS.values() for name in re.findall(r"--[a-z-]+", output)}
    assert named <= {*FLAGS, "--engine"}


def test_the_migration_page_has_the_flag():
    assert [
        flag for flag in THEIRS if f"{flag}`" not in MIGRATION and f"{flag} " not in MIGRATION
    ] == []
