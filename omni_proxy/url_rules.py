"""Routes of a Quart application that builds no URLs: matching only, as both HTTP APIs need it.

Werkzeug compiles two functions for each route that build its URL: half of the time that an
application takes to be made. Invariant: matching is Quart's own. Must not be used where `url_for`
is, which then raises NotImplementedError.
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
    raise NotImplementedError(f"no URL is built of {self.rule}")


def match_only(app: Quart) -> None:
    """For the routes that are added from now on."""
    app.url_rule_class = MatchOnlyRule
