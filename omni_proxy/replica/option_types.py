"""Types of command-line options: counts, ports, times and addresses within their bounds.

Invariant: a value outside its bounds raises `argparse.ArgumentTypeError`, whose message has the
value and the bound. Imports neither torch nor the web framework.
"""

from __future__ import annotations

import argparse
import ipaddress
from typing import Final, TypeVar

from omni_proxy.shared.origins import MAX_PORT

MAX_SECS: Final = 3600

_Number = TypeVar("_Number", int, float)


def count(text: str) -> int:
    return _at_least(1, text)


def count_or_0(text: str) -> int:
    return _at_least(0, text)


def port_number(text: str) -> int:
    return _within(1, MAX_PORT, text, int)


def port_or_0(text: str) -> int:
    """Return a port; 0 is any free one."""
    return _within(0, MAX_PORT, text, int)


def seconds(text: str) -> float:
    return _within(0, MAX_SECS, text, float)


def deadline(text: str) -> float:
    """Return seconds; 0 is refused, because every operation would time out."""
    number = float(text)
    if not 0 < number <= MAX_SECS:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most {MAX_SECS}")
    return number


def address(text: str) -> str:
    """Return an address; IPv6 may be in brackets, as in a URL."""
    if not text.startswith("["):
        return text
    bare = text[1:-1]
    try:
        ipaddress.IPv6Address(bare if text.endswith("]") else text)
    except ipaddress.AddressValueError:
        raise argparse.ArgumentTypeError(f"{text} is not an IPv6 address in brackets") from None
    return bare


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def _within(least: int, most: int, text: str, kind: type[_Number]) -> _Number:
    number = kind(text)
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not within {least} and {most}")
    return number
