"""Ids of requests as clients name them: without the prefix of vLLM's routes, or a choice. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

CHOICE: Final = re.compile(r"[-_][0-9]+$")
ID_PREFIXES: Final = ("chatcmpl-", "cmpl-", "generate-tokens-")


def id_matcher(wanted: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that matches the wanted request ids, with or without vLLM's prefix.

    It also matches the ids of a request's choices.
    """
    names = set(wanted)
    names |= {bare_id(name) for name in names}

    def matches(request_id: str) -> bool:
        bare = bare_id(request_id)
        return not names.isdisjoint((request_id, bare, without_choice(bare)))

    return matches


def bare_id(request_id: str) -> str:
    """The id without the prefix that vLLM's routes add to it."""
    for prefix in ID_PREFIXES:
        if request_id.startswith(prefix):
            return request_id[len(prefix) :]
    return request_id


def without_choice(request_id: str) -> str:
    """The id without its choice: `a-3` (`a_3` in SGLang's routers) is choice or prompt 3 of `a`."""
    return CHOICE.sub("", request_id)
