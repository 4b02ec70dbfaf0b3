"""Checks that the optional packages that a configuration needs are installed.

Invariant: a file that needs a missing package is refused as a whole, with the command that installs
it. The check imports only the parents of the modules that it looks for. Blocking.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from omni_proxy.config.parse import ConfigError, Problem
from omni_proxy.config.schema import Config

OTEL_MODULES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
OTEL_INSTALL: Final = "pip install 'omni-proxy[otel]'"


def check_extras(config: Config, file: str) -> None:
    """Raises ConfigError."""
    if config.observe.otlp_endpoint and not all(map(is_installed, OTEL_MODULES)):
        reason = "needs the OpenTelemetry SDK, which is not installed"
        raise ConfigError(
            [Problem("observe.otlp_endpoint", None, reason, OTEL_INSTALL, file)], file
        )


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parents is missing
        return False
