"""Callers' keys that were added over HTTP: part of the saved state, in addition to those of FILE.

Invariant: only the SHA-256 of a key is saved. FILE takes precedence: its entries hide saved ones
with the same name or key. Functions return new values and modify nothing.
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
    """The key can't be added; the message has the reason."""


class KeyKnown(Exception):
    """Another caller already has the name or the key."""


def read_saved_key(body: Mapping[str, object]) -> SavedKey:
    """Parse the body of a request. Raises KeyRefused."""
    values, findings = walk(dict(body), SavedKey)
    for path, reason, hint in findings:
        name = format_path(path) or "body"
        raise KeyRefused(f"{name}: {reason}" + (f"; {hint}" if hint else ""))
    for name in _REQUIRED:
        if not values.get(name):
            raise KeyRefused(f"{name} is missing")
    if values.get("key_env") or values.get("key_file"):
        raise KeyRefused("over HTTP a key can be given only as key_sha256")
    return msgspec.convert(values, SavedKey)


def with_saved_keys(config: Config, state: SavedState) -> Config:
    """`config` with the saved keys of `state`, which replace any saved keys in `config`."""
    own = tuple(entry for entry in config.keys if not isinstance(entry, SavedKey))
    names = {entry.name for entry in own}
    hashes = {entry.key_sha256 for entry in own}
    saved = (key for key in state.keys if key.name not in names and key.key_sha256 not in hashes)
    keys = (*own, *saved)
    return config if keys == config.keys else structs.replace(config, keys=keys)


def with_key(key: SavedKey, state: SavedState, config: Config) -> SavedState:
    """Raises KeyKnown, and KeyRefused if MAX_KEYS is reached."""
    for entry in (*config.keys, *state.keys):
        if entry.name == key.name:
            raise KeyKnown(f"caller {key.name} already exists")
        if entry.key_sha256 == key.key_sha256:
            raise KeyKnown(f"caller {entry.name} already has this key")
    if len(config.keys) >= MAX_KEYS:
        raise KeyRefused(f"the limit of {MAX_KEYS} keys is reached")
    return structs.replace(state, keys=(*state.keys, key))


def without_hidden_keys(state: SavedState, config: Config) -> SavedState:
    """Drop saved keys that FILE hides, so that they don't return when FILE's entry is removed."""
    kept = tuple(key for key in state.keys if key in config.keys)
    return state if kept == state.keys else structs.replace(state, keys=kept)


def without_key(state: SavedState, name: str) -> SavedState:
    """Raises KeyError if no key with this name was added over HTTP."""
    if all(key.name != name for key in state.keys):
        raise KeyError(name)
    return structs.replace(state, keys=tuple(key for key in state.keys if key.name != name))
