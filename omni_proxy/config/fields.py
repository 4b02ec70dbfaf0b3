"""Readers for values with a spelling of their own: sizes, probe endpoints, worker URLs.

Each takes the value as TOML gave it, returns the value that the schema stores, and raises
ValueError with a reason. The schema names them in `Meta(extra={"read": …})`; `walk` calls them.
"""

import re
from fractions import Fraction
from typing import Final

from omni_proxy.config.url import normalize_url

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}


def read_size(value: object) -> object:
    """Bytes from "64MiB"; what is no string is left for the type check."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f'"{value}" is no size; write bytes, or a string such as "64MiB"')
    size = Fraction(match[1]) * unit
    if size.denominator != 1:
        raise ValueError(f'"{value}" is not a whole number of bytes')
    return int(size)


def read_endpoint(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"/[^?#\s\x00-\x20\x7f]*", value):
        raise ValueError(f'"{value}" must be a path: begin with "/", hold no "?", "#" or space')
    return value


def read_worker_url(value: object) -> object:
    return normalize_url(value, allow_unix=True) if isinstance(value, str) else value


def read_network_url(value: object) -> object:
    """For sources other than FILE: sockets of this machine are FILE's to name."""
    return normalize_url(value, allow_unix=False) if isinstance(value, str) else value
