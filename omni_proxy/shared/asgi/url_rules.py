"""URL rules for Quart applications that only match routes and build no URLs.

Werkzeug compiles two functions per route to build its URL, which takes much of the time to create
an application. Invariant: matching is Quart's own. Must not be used together with `url_for`, which
then raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from quart import Quart
from quart.routing import QuartRule


class MatchOnlyRule(QuartRule):
    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        return _build_nothing


def _build_nothing(self: MatchOnlyRule, **_: object) -> NoReturn:
    raise NotImplementedError(f"URLs can't be built for {self.rule}")


def match_only(app: Quart) -> None:
    """Use `MatchOnlyRule` for all routes that are added from now on."""
    app.url_rule_class = MatchOnlyRule
