"""Routes of the configuration: [[control_routes]] as admin routes, and what a path may not be.

Pure. Invariant: a configured route never takes the place of a built-in one, so that no file can
turn a control route into model traffic or send a model request to all workers.
"""

from __future__ import annotations

from omni_proxy.admin_ops.routes import BY_PATH, AdminRoute, Kind
from omni_proxy.admin_ops.routes import is_known as is_built_in
from omni_proxy.config.problem import ConfigError, Problem
from omni_proxy.config.schema import Config
from omni_proxy.routing.routes import MethodNotAllowed, match_route

READ_METHODS = ("GET", "POST")


def control_route(config: Config, path: str) -> AdminRoute | None:
    """The configured control route of exactly this path. A reading one takes GET, too."""
    for entry in config.control_routes:
        if entry.path == path:
            kind = Kind(entry.kind)
            return AdminRoute(path, kind, READ_METHODS if kind is Kind.READ else ("POST",))
    return None


def is_known(path: str, config: Config) -> bool:
    """Whether the admin API has a route for it, whatever the method; `path` is decoded."""
    return is_built_in(path) or control_route(config, path) is not None


def check_routes(config: Config, file: str) -> None:
    """Raises ConfigError for a configured path that is a built-in route's."""
    paths = [(f"routes[{i}].path", route.path) for i, route in enumerate(config.routes)]
    control = enumerate(config.control_routes)
    paths += [(f"control_routes[{i}].path", route.path) for i, route in control]
    problems = [
        Problem(key, None, f"{path} {conflict}", "choose another path", file)
        for key, path in paths
        if (conflict := _taken(path))
    ]
    if problems:
        raise ConfigError(problems, file)


def _taken(path: str) -> str:
    """Why a configured route can't have this path, else ""."""
    if path in BY_PATH or is_built_in(path):
        return "is a built-in control route"
    try:
        built_in = match_route("POST", path) is not None
    except MethodNotAllowed:
        built_in = True
    return "is a built-in model route" if built_in else ""
