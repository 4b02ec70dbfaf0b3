"""The callers of model routes: their limits and usage, and adding and removing their keys."""

from __future__ import annotations

import logging
from functools import partial

from quart import Quart, Response

from omni_proxy.admin_api.fleet_changes import change_state
from omni_proxy.admin_api.responses import etag, json_object, json_response
from omni_proxy.admin_api.serializers.key_records import key_records, key_refusals
from omni_proxy.admin_api.services import KeyServices
from omni_proxy.config.schema import Config
from omni_proxy.config.state import (
    KeyExists,
    KeyRefused,
    SavedState,
    read_saved_key,
    with_key,
    without_key,
)
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError, bad_request

_log = logging.getLogger(__name__)


class KeyRoutes:
    """The callers of model routes: their limits and usage, and adding and removing keys. Clients
    send only the hash of a key, and responses contain neither; entries of FILE are only shown."""

    def __init__(self, keys: KeyServices, config_store: ConfigStore) -> None:
        self._keys = keys
        self._config_store = config_store

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/keys", "keys", self.show)
        app.add_url_rule("/keys", "add_key", self.add, methods=["POST"])
        app.add_url_rule("/keys/<path:caller>", "remove_key", self.remove, methods=["DELETE"])

    async def show(self) -> Response:
        return json_response(
            {
                "keys": key_records(self._keys, self._config_store.config),
                **key_refusals(self._keys),
                "error": self._keys.error() or None,
            }
        )

    async def add(self) -> Response:
        """Add a key. It is valid in all processes when the response is sent."""
        try:
            key = read_saved_key(await json_object())
            await change_state(self._config_store, partial(with_key, key), at_once=True)
        except KeyRefused as error:
            raise bad_request(str(error)) from None
        except KeyExists as error:
            raise HttpError(409, str(error), "caller_already_exists") from None
        _log.info("caller_key_added name=%s", key.name)
        return self._done(key.name)

    async def remove(self, caller: str) -> Response:
        """Remove a key. Its requests in flight continue, further ones are refused."""

        def edit(state: SavedState, config: Config) -> SavedState:
            try:
                return without_key(state, caller)
            except KeyError:
                raise _delete_error(caller, config) from None

        await change_state(self._config_store, edit, at_once=True)
        _log.info("caller_key_removed name=%s", caller)
        return self._done(caller)

    def _done(self, name: str) -> Response:
        store = self._config_store
        body = {"status": "ok", "name": name, "key_required": _key_required(store.config)}
        return json_response(body, headers=etag(store.revision))


def _key_required(config: Config) -> bool:
    """Whether model routes are closed to requests without a key."""
    return bool(config.server.api_key or config.keys)


def _delete_error(name: str, config: Config) -> HttpError:
    if any(entry.name == name for entry in config.keys):
        message = f"{name} is in the configuration file: remove its [[keys]] entry there"
        return HttpError(409, message, "caller_in_file")
    return HttpError(404, f"there is no caller {name}", "unknown_caller")
