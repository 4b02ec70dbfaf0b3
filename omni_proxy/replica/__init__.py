"""The replica: an inference server with the same HTTP API as SGLang workers.

It imports nothing of the proxy, and the proxy starts it only as a command. Public names are
imported on first use, so that importing the package does not load a web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_proxy.replica.api.app import create_app
    from omni_proxy.replica.http_server import launch_server
    from omni_proxy.replica.pipeline.client import Client
    from omni_proxy.replica.pipeline.config import PipelineConfig

__all__ = ["Client", "PipelineConfig", "create_app", "launch_server"]

_MODULES = {
    "Client": "omni_proxy.replica.pipeline.client",
    "PipelineConfig": "omni_proxy.replica.pipeline.config",
    "create_app": "omni_proxy.replica.api.app",
    "launch_server": "omni_proxy.replica.http_server",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
