"""The profiler's routes: start and stop a run on all stages together (note:api-server 4.1).

Contract: a start responds before the stages have begun, a stop before they have ended; stopping
without an active run is not an error. The routes need the admin key if one is set. Files are
written only below a folder that the operator allows.
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
from omni_proxy.replica.api.common.lenient_decode import validate
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import admin_body
from omni_proxy.replica.pipeline.stage_messages import ProfilerStart

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
    """Without a run_id, the active run is stopped."""

    run_id: str | None = None


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = _Routes(context)
    for view in (routes.start_profile, routes.start_request_profile):
        app.add_url_rule(f"/{view.__name__}", view.__name__, view, methods=["POST"])
    for path in ("stop_profile", "stop_request_profile"):
        app.add_url_rule(f"/{path}", path, routes.stop, methods=["POST"])


class _Routes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def start_profile(self) -> Response:
        body = validate(StartBody, await admin_body(self._context))
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
        self._check_paths(template, event_dir)
        start = ProfilerStart(run_id, template, event_dir, body.enable_torch)
        self._context.client.profiler_start(start)
        return json_response(
            {
                "run_id": run_id,
                "trace_path_template": template,
                "event_dir": event_dir,
                "enable_torch": body.enable_torch,
            }
        )

    async def start_request_profile(self) -> Response:
        body = validate(StartEventsBody, await admin_body(self._context))
        run_id, folder = _run_id(body.run_id), os.environ.get(FOLDER_VARIABLE, "")
        event_dir = body.event_dir or (f"{folder}/{run_id}/events" if folder else None)
        if event_dir is None:
            raise DetailError(400, f"event_dir is required when {FOLDER_VARIABLE} is not set")
        self._check_paths(event_dir)
        self._context.client.profiler_start(ProfilerStart(run_id, "", event_dir, False))
        return json_response({"run_id": run_id, "event_dir": event_dir})

    def _check_paths(self, *paths: str | None) -> None:
        """Raises DetailError 400 for a path outside the folders allowed for profiles."""
        roots = profile_roots(self._context)
        for path in filter(None, paths):
            try:
                resolved = Path(path).resolve()
            except (OSError, ValueError, RuntimeError):  # a NUL byte, or a loop of symbolic links
                raise DetailError(400, f"{path!r} is not a valid path") from None
            if not any(resolved.is_relative_to(root) for root in roots):
                folders = " or ".join(map(str, roots))
                raise DetailError(
                    400, f"{path!r} is not below {folders}: start the server with --profile-root"
                )

    async def stop(self) -> Response:
        body = validate(StopBody, await admin_body(self._context))
        return json_response({"run_id": self._context.client.profiler_stop(body.run_id)})


def profile_roots(context: RouteContext) -> list[Path]:
    """The folders below which profiles may be written, the operator's setting first."""
    folders = [context.profile_root] if context.profile_root else []
    variable = os.environ.get(FOLDER_VARIABLE)
    if not folders:
        folders = ["/"] if context.admin_api_key else [tempfile.gettempdir()]
        folders += [variable] if variable else []
    return [Path(root).resolve() for root in folders]


def _run_id(run_id: str | None) -> str:
    return run_id or datetime.now().astimezone().strftime("run_%Y%m%d_%H%M%S")
