"""Callers' keys that were added over HTTP: they stand in the saved state, beside those of FILE.

Invariant: only a SHA-256 is saved, and FILE wins: an entry of it hides the saved one with the same
name or the same key. Every function returns a new value and changes nothing.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import structs

from omni_proxy.config.api_keys import MAX_KEYS, SavedKey
from omni_proxy.config.problem import format_path
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState
from omni_proxy.config.validate import walk

_REQUIRED: Final = ("name", "key_sha256")


class KeyRefused(Exception):
    """Why it can't be added."""


class KeyKnown(Exception):
    """A caller has the name, or the key, already."""


def read_saved_key(body: Mapping[str, object]) -> SavedKey:
    """Of a request's body. Raises KeyRefused."""
    values, findings = walk(dict(body), SavedKey)
    for path, reason, hint in findings:
        name = format_path(path) or "body"
        raise KeyRefused(f"{name}: {reason}" + (f"; {hint}" if hint else ""))
    for name in _REQUIRED:
        if not values.get(name):
            raise KeyRefused(f"{name} is missing")
    if values.get("key_env") or values.get("key_file"):
        raise KeyRefused("over HTTP a key is given by its key_sha256 alone")
    return msgspec.convert(values, SavedKey)


def with_saved_keys(config: Config, state: SavedState) -> Config:
    """`config` with the keys of this state, in place of those of another one."""
    own = tuple(entry for entry in config.keys if not isinstance(entry, SavedKey))
    names = {entry.name for entry in own}
    hashes = {entry.key_sha256 for entry in own}
    saved = (key for key in state.keys if key.name not in names and key.key_sha256 not in hashes)
    keys = (*own, *saved)
    return config if keys == config.keys else structs.replace(config, keys=keys)


def with_key(key: SavedKey, state: SavedState, config: Config) -> SavedState:
    """Raises KeyKnown, and KeyRefused where there are as many as can be."""
    for entry in (*config.keys, *state.keys):
        if entry.name == key.name:
            raise KeyKnown(f"there is a caller {key.name} already")
        if entry.key_sha256 == key.key_sha256:
            raise KeyKnown(f"the caller {entry.name} has this key")
    if len(config.keys) >= MAX_KEYS:
        raise KeyRefused(f"there are {MAX_KEYS} keys already, as many as can be")
    return structs.replace(state, keys=(*state.keys, key))


def without_hidden_keys(state: SavedState, config: Config) -> SavedState:
    """Without those that FILE hides: they are not to come back with the entry's end."""
    kept = tuple(key for key in state.keys if key in config.keys)
    return state if kept == state.keys else structs.replace(state, keys=kept)


def without_key(state: SavedState, name: str) -> SavedState:
    """Raises KeyError for a name that was not added over HTTP."""
    if all(key.name != name for key in state.keys):
        raise KeyError(name)
    return structs.replace(state, keys=tuple(key for key in state.keys if key.name != name))
