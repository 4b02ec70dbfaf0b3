"""The profiler's routes: start and stop a run on every stage at once (api-server.md 4.1).

Contract: a start answers before the stages have begun, a stop before they have ended; stopping what
does not run is no fault. They need the admin key where one is set. Nothing is written but below a
folder that the operator allows.
"""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.fields import validate
from omni_proxy.replica.api.native.admin_operations import admin_body
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.messages import ProfilerStart

FOLDER_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"


class StartBody(msgspec.Struct):
    """POST /start_profile."""

    run_id: str | None = None
    trace_path_template: str | None = None
    config: dict[str, Any] | None = None
    event_dir: str | None = None
    enable_torch: bool = True


class StartEventsBody(msgspec.Struct):
    """POST /start_request_profile."""

    run_id: str | None = None
    event_dir: str | None = None


class StopBody(msgspec.Struct):
    """Without a run_id whatever runs is stopped."""

    run_id: str | None = None


def mount(app: QuartTrio, served: RouteContext) -> None:
    routes = _Routes(served)
    for view in (routes.start_profile, routes.start_request_profile):
        app.add_url_rule(f"/{view.__name__}", view.__name__, view, methods=["POST"])
    for path in ("stop_profile", "stop_request_profile"):
        app.add_url_rule(f"/{path}", path, routes.stop, methods=["POST"])


class _Routes:
    def __init__(self, served: RouteContext) -> None:
        self._served = served

    async def start_profile(self) -> Response:
        body = validate(StartBody, await admin_body(self._served))
        run_id, folder = _run_id(body.run_id), os.environ.get(FOLDER_VARIABLE, "")
        template = body.trace_path_template or (f"{folder}/{run_id}/trace" if folder else "")
        event_dir = body.event_dir or (f"{folder}/{run_id}/events" if folder else None)
        if body.enable_torch and not template:
            raise DetailError(
                400, f"trace_path_template is required when {FOLDER_VARIABLE} is not set"
            )
        if not body.enable_torch:
            template = ""
            if event_dir is None:
                raise DetailError(
                    400,
                    "event_dir is required when enable_torch=false and "
                    f"{FOLDER_VARIABLE} is not set",
                )
        self._refuse_outside(template, event_dir)
        start = ProfilerStart(run_id, template, event_dir, body.enable_torch)
        self._served.client.profiler_start(start)
        return json_response(
            {
                "run_id": run_id,
                "trace_path_template": template,
                "event_dir": event_dir,
                "enable_torch": body.enable_torch,
            }
        )

    async def start_request_profile(self) -> Response:
        body = validate(StartEventsBody, await admin_body(self._served))
        run_id, folder = _run_id(body.run_id), os.environ.get(FOLDER_VARIABLE, "")
        event_dir = body.event_dir or (f"{folder}/{run_id}/events" if folder else None)
        if event_dir is None:
            raise DetailError(400, f"event_dir is required when {FOLDER_VARIABLE} is not set")
        self._refuse_outside(event_dir)
        self._served.client.profiler_start(ProfilerStart(run_id, "", event_dir, False))
        return json_response({"run_id": run_id, "event_dir": event_dir})

    def _refuse_outside(self, *paths: str | None) -> None:
        """Raises DetailError 400 for a path that is not below a folder where profiles may be."""
        roots = profile_roots(self._served)
        for path in filter(None, paths):
            try:
                found = Path(path).resolve()
            except (OSError, ValueError, RuntimeError):  # a NUL, or links that go in circles
                raise DetailError(400, f"{path!r} is no path") from None
            if not any(found.is_relative_to(root) for root in roots):
                told = " or ".join(map(str, roots))
                raise DetailError(
                    400, f"{path!r} is not below {told}: start the server with --profile-root"
                )

    async def stop(self) -> Response:
        body = validate(StopBody, await admin_body(self._served))
        return json_response({"run_id": self._served.client.profiler_stop(body.run_id)})


def profile_roots(served: RouteContext) -> list[Path]:
    """Profiles are written below one of these. What the operator has named counts."""
    named = [served.profile_root] if served.profile_root else []
    variable = os.environ.get(FOLDER_VARIABLE)
    if not named:
        named = ["/"] if served.admin_api_key else [tempfile.gettempdir()]
        named += [variable] if variable else []
    return [Path(root).resolve() for root in named]


def _run_id(given: str | None) -> str:
    return given or datetime.now().astimezone().strftime("run_%Y%m%d_%H%M%S")
