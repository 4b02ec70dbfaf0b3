"""GET /config: the running configuration, without secrets; POST /reload: reads the file again."""

from __future__ import annotations

from quart import Quart, Response

from omni_proxy.admin_api.responses import etag, if_match, json_response, raise_on_mismatch
from omni_proxy.config.diff import redacted
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError


class ConfigRoutes:
    def __init__(self, config_store: ConfigStore) -> None:
        self._config_store = config_store

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/config", "config", self.show)
        app.add_url_rule("/reload", "reload", self.reload, methods=["POST"])

    async def show(self) -> Response:
        config_store = self._config_store
        payload = {
            "revision": config_store.revision,
            "config": redacted(config_store.config),
            "last_reload": config_store.last_reload,
        }
        return json_response(payload, headers=etag(config_store.revision))

    async def reload(self) -> Response:
        reloaded = await self._config_store.reload("http", if_match())
        raise_on_mismatch(reloaded)
        if reloaded.error is not None:
            raise HttpError(
                422,
                str(reloaded.error),
                "config_refused",
                outcome=reloaded.outcome,
                revision=reloaded.revision,
                refused=reloaded.error.as_dict(),
            ).with_headers(*etag(reloaded.revision).items())
        payload = {
            "outcome": reloaded.outcome,
            "revision": reloaded.revision,
            "diff": reloaded.diff,
        }
        return json_response(payload, headers=etag(reloaded.revision))
