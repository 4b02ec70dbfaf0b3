"""The replica: a real inference server behind the same HTTP surface as the workers of others.

It knows nothing of the proxy, and the proxy knows it only as a command that it starts. What it
offers to programs is imported when it is asked for: the name alone must not cost a web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_proxy.replica.api.app import create_app
    from omni_proxy.replica.pipeline.client import Client
    from omni_proxy.replica.pipeline.config import PipelineConfig
    from omni_proxy.replica.pipeline.launch import launch_server

__all__ = ["Client", "PipelineConfig", "create_app", "launch_server"]

_PLACES = {
    "Client": "omni_proxy.replica.pipeline.client",
    "PipelineConfig": "omni_proxy.replica.pipeline.config",
    "create_app": "omni_proxy.replica.api.app",
    "launch_server": "omni_proxy.replica.pipeline.launch",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
