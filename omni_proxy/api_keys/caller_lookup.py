"""All callers of model routes, by their keys. Pure.

Invariant: while `guarded`, a request without a valid key is refused, also before the first keys
have been read. A caller keeps its counts as long as its name is configured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hmac import compare_digest
from typing import Final

from omni_proxy.api_keys.caller_limits import (
    REFUSED_REQUESTS,
    ApiCaller,
    CountTokens,
    LocalRows,
    SlotRows,
)
from omni_proxy.api_keys.key_table import KeyTable, presented_key
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.wire.errors import HttpError

KEY_FIELDS: Final = frozenset((b"authorization", b"x-api-key"))
_KEY_LINES: Final = re.compile(rb"\r\n(?i:(authorization)|x-api-key)[ \t]*:[ \t]*([^\r\n]*)")
UNKNOWN_SLOT: Final = 0  # counts requests without a valid key; callers have the slots above it


class Callers:
    """`[server] api_key` and `[[keys]]`. `guarded`: requests need a key. `keyed`: `[[keys]]` is not
    empty."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self.guarded = self.keyed = False
        self._server_key = b""
        self._table: KeyTable[CallerKey] = KeyTable()
        self._by_name: dict[str, ApiCaller] = {}
        self._rows: SlotRows = LocalRows()
        self._unknown = self._rows.own(UNKNOWN_SLOT)

    def __iter__(self) -> Iterator[ApiCaller]:
        return iter(self._by_name.values())

    def configure(self, config: Config) -> None:
        """Apply the configuration, except for the keys of `[[keys]]`, which are set by `follow`."""
        self._server_key = config.server.api_key.encode()
        self.keyed = bool(config.keys)
        self.guarded = self.keyed or bool(self._server_key)

    def follow(self, table: KeyTable[CallerKey], slots: Mapping[str, int], rows: SlotRows) -> None:
        """Apply the keys. `slots`: slots of the callers in `rows`, by name."""
        before, self._by_name = self._by_name, {}
        for entry in table.entries:
            slot = slots[entry.name]
            caller = before.get(entry.name)
            if caller is None or caller.slot != slot or rows is not self._rows:
                caller = ApiCaller(entry, slot, rows, self._count_tokens)
            else:
                caller.configure(entry, rows)
            self._by_name[entry.name] = caller
        for caller in before.values():
            if self._by_name.get(caller.name) is not caller:
                caller.retire()
        self._table, self._rows = table, rows
        self._unknown = rows.own(UNKNOWN_SLOT)

    def publish(self) -> None:
        """Update the cells of all callers."""
        for caller in self._by_name.values():
            caller.publish()

    def find(self, key: bytes, *, counts: bool = True) -> ApiCaller | None:
        """The caller with this key; None for `[server] api_key`, which has no limits. `counts`:
        count a wrong key as a refused request. Raises HttpError 401."""
        if self._server_key and compare_digest(key, self._server_key):
            return None
        entry = self._table.find(key)
        if entry is None:
            self._unknown[REFUSED_REQUESTS] += counts
            raise HttpError(
                401, "an API key is needed: Authorization: Bearer <key>", "invalid_api_key"
            ).with_headers(("www-authenticate", "Bearer"))
        return self._by_name[entry.name]


def key_in(lines: bytes) -> bytes:
    """The key in a head's lines, b"" for none. `lines` begin with the request line."""
    authorization = x_api_key = b""
    for bearer, value in _KEY_LINES.findall(lines):
        if bearer:
            authorization = authorization or value
        else:
            x_api_key = x_api_key or value
    return presented_key(authorization, x_api_key)


def without_key_lines(lines: bytes) -> bytes:
    """A head's lines, or a part of them, without fields that may contain a key of the proxy."""
    return _KEY_LINES.sub(b"", lines)


def may_use(caller: ApiCaller, model: str | None, fleet_models: frozenset[str]) -> bool:
    """Whether the caller may use this model. A request without a model may be served by any worker,
    so all models of the fleet must be allowed. `fleet_models`: empty if they are unknown."""
    if not caller.models:
        return True
    if model:
        base, _, adapter = model.partition(":")
        return model in caller.models or (base in caller.models and adapter in caller.models)
    return bool(fleet_models) and fleet_models <= caller.models
