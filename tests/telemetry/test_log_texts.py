"""The form of log lines: `event key=value key=value`, and an explanation after a colon."""

import ast
import re

import pytest

from tests.tree import ROOT, nodes, sources

LEVELS = frozenset(("debug", "info", "warning", "error", "exception", "critical"))
VALUE = r"""(?:"[^"]*"|[^\s:,"]+)"""
FORM = re.compile(
    rf"(?:[a-z][a-z0-9]*_)+(?:[a-z0-9]+|%s)(?: [a-z0-9_.]+={VALUE}| %s)*(?:[:,] .+)?", re.DOTALL
)
# Texts for a person who has just started the program, or lines of another program.
OTHERS = frozenset((
    "listening on %s%s", "listening on %s for Envoy's external processor", "%s is served at http://%s:%d",
    "cannot listen on %s: %s", "cannot write to %s: %s (%d lines lost)", "%s", "%s %s",
    "%s secs=%.1f, stacks of all threads:\n%s",
))  # fmt: skip


def texts():
    for path in sources():
        for node in nodes(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("_log", "log")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0].value


def test_log_lines_name_an_event_and_its_values():
    by_place = dict(texts())
    assert len(by_place) > 100
    wrong = {
        place: text
        for place, text in by_place.items()
        if text not in OTHERS and not FORM.fullmatch(text)
    }
    assert not wrong


def test_each_exception_is_still_used():
    assert set(dict(texts()).values()) >= OTHERS


@pytest.mark.parametrize("text", ["omni-proxy %s starts", "worker is gone", "a: %s", "keys lost"])
def test_a_sentence_does_not_match_the_form(text):
    assert not FORM.fullmatch(text)
