"""Which routes a key of each role may call, in and outside the OpenAPI document."""

from hashlib import sha256
from pathlib import Path
from typing import get_args

import pytest

from omni_proxy.admin_api.access.roles import ANY_METHOD, ROLE_TABLE, needs_key, roles_for
from omni_proxy.admin_api.openapi_document import ENGINE_PATHS, TABLE
from omni_proxy.admin_ops.admin_route_table import ROUTES, Kind
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.schema import (
    AdminConfig,
    AdminKey,
    AdminRole,
    ControlRouteEntry,
    ServerConfig,
)
from tests.admin_api.api_fixture import A, B, build_api, entry

ROLES = get_args(AdminRole)
REACHED = 299
CLOSED = [route for route in TABLE if needs_key(route.method.upper(), route.path, AdminConfig())]
# The roles of each closed route, written by hand: ROLE_TABLE is compared with them.
READ = {
    "/status", "/config", "/feed", "/history", "/keys", "/metrics", "/engine_metrics",
    "/v1/loads", "/weights",
    "/weights/versions", "/model_info", "/weight_info", "/is_paused", "/is_sleeping",
    "/get_world_size", "/v1/rl/workers", "/v1/rl/workers/{worker_id}", "/explain",
}  # fmt: skip
OPERATE = {
    "/workers", "/workers/{worker_id}", "/workers/{worker_id}/drain", "/add_worker",
    "/remove_worker", "/reload", "/flush_cache", "/reset_prefix_cache", "/start_profile",
    "/stop_profile",
}  # fmt: skip
BOTH = {
    "/abort_request", "/abort_requests", "/select", "/select_and_reserve",
    "/reservations/{reservation_id}",
}  # fmt: skip


KEYS = {"/keys", "/keys/{caller}"}  # adding a caller can close the model routes


def secret(name):
    return f"{name}-secret"


def keys(*roles):
    return tuple(
        AdminKey(name=role, role=role, key_sha256=sha256(secret(role).encode()).hexdigest())
        for role in roles
    )


def api_with(*roles, admin=None, **tables):
    """Every allowed call ends with 299 before its route."""
    entries = keys(*(roles or ROLES))
    admin = admin or AdminConfig(keys=entries)
    services = {"find_admin_key": KeyTable(entries).find}
    api = build_api(entry(A), entry(B), admin=admin, services=services, **tables)

    async def reached():
        return "", REACHED

    api.app.before_request(reached)
    return api


def as_role(role):
    return {"Authorization": f"Bearer {secret(role)}"}


def concrete(path):
    path = (
        path.replace("{worker_id}", "x").replace("{caller}", "x").replace("{reservation_id}", "x")
    )
    return path.replace("{path}", "some/path").replace("{model}", "m")


def allowed_roles(method, path):
    if path in ENGINE_PATHS:
        return {"all"}
    if path in KEYS and method != "get":
        return {"all"}
    if path in READ or (method, path) == ("get", "/weights/rollout"):
        return set(ROLES)
    if path in BOTH:
        return {"operate", "weights", "all"}
    return {"operate", "all"} if path in OPERATE else {"weights", "all"}


@pytest.mark.parametrize("role", ROLES)
async def test_each_documented_route_answers_exactly_its_roles(role):
    api, described = api_with(), build_api().app
    for route in TABLE:
        response = await api.client().open(
            concrete(route.path), method=route.method.upper(), headers=as_role(role)
        )
        allowed = route not in CLOSED or role in allowed_roles(route.method, route.path)
        assert response.status_code == (REACHED if allowed else 403), route
        if not allowed:
            error = (await response.get_json())["error"]
            assert error["code"] == "role_not_allowed"
            assert f"'{role}' has the role {role}" in error["message"]
            assert "all" in error["message"]
    document = await (await described.test_client().get("/openapi.json")).get_json()
    for route in CLOSED:
        (scheme,) = document["paths"][route.path][route.method]["security"]
        documented = set(scheme["key"])
        assert documented == (
            set() if route.path in ENGINE_PATHS else allowed_roles(route.method, route.path)
        )


def test_only_engine_paths_and_keys_are_left_to_the_role_all():
    left = {r.path for r in CLOSED if roles_for(r.method.upper(), r.path) == ("all",)}
    assert left == {*ENGINE_PATHS, *KEYS}


def test_every_path_of_the_role_table_is_served():
    served = {concrete(route.path).replace("/x", "/*") for route in TABLE}
    rows = {path for row in ROLE_TABLE if not row.engine_only for path in row.paths}
    assert rows <= served
    assert {route.path for route in ROUTES} <= rows


def test_admin_routes_have_the_role_of_their_kind():
    for route in ROUTES:
        roles = roles_for("POST", route.path)
        if route.kind in (Kind.GROUP, Kind.UPDATE, Kind.PAUSE, Kind.CONTINUE):
            assert roles == ("weights", "all")
        elif route.kind in (Kind.FLUSH, Kind.PLAIN):
            assert roles == ("operate", "all")


@pytest.mark.parametrize("prefix", ["/v1/rl/engine/", "/v1/rl/workers/x/engine/"])
@pytest.mark.parametrize(
    ("method", "path", "roles"),
    [
        ("GET", "model_info", ROLES),
        ("GET", "health", ROLES),
        ("HEAD", "is_paused", ROLES),
        ("GET", "flush_cache", ("operate", "all")),
        ("POST", "start_profile", ("operate", "all")),
        ("GET", "abort_request", ("operate", "weights", "all")),
        ("GET", "release_memory_occupation", ("weights", "all")),
        ("POST", "resume_memory_occupation", ("weights", "all")),
        ("PUT", "pause_generation", ("weights", "all")),
        ("POST", "health", ("all",)),
        ("GET", "get_server_info", ("all",)),  # an engine's server_info shows its keys
        ("GET", "start_profile/", ("all",)),
        ("GET", "model_info%3Fx", ("all",)),
        ("POST", "anything/else", ("all",)),
    ],
)
async def test_a_path_sent_on_to_engines_has_the_roles_of_the_path_itself(
    prefix, method, path, roles
):
    api = api_with()
    for role in ROLES:
        response = await api.client().open(prefix + path, method=method, headers=as_role(role))
        assert (response.status_code == REACHED) == (role in roles)
        assert response.status_code in (REACHED, 403)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("read", ROLES), ("plain", ("operate", "all")), ("pause", ("weights", "all")),
        ("continue", ("weights", "all")), ("group", ("weights", "all")),
        ("update", ("weights", "all")),
    ],
)  # fmt: skip
async def test_a_configured_route_has_the_role_of_its_kind(kind, roles):
    api = api_with(control_routes=(ControlRouteEntry(path="/mine", kind=kind),))
    for role in ROLES:
        response = await api.client().post("/mine", headers=as_role(role))
        assert response.status_code == (REACHED if role in roles else 403)


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [
        ("", 401, "admin_key_required"),
        ("wrong", 403, "admin_key_invalid"),
        (secret("operat"), 403, "admin_key_invalid"),
    ],
)
async def test_control_routes_are_closed_without_a_valid_key(token, status, code):
    headers = {"Authorization": f"Bearer {token}"}
    # The key of model routes is "wrong", too: it is not accepted for control routes.
    api = api_with("read", server=ServerConfig(api_key="wrong"))
    for method, path in (("GET", "/status"), ("POST", "/reload")):
        response = await api.client().open(path, method=method, headers=headers)
        assert response.status_code == status
        assert (await response.get_json())["error"]["code"] == code
    assert (await api.client().get("/live")).status_code == REACHED


async def test_the_main_key_may_do_everything_if_there_are_other_keys():
    api = api_with(admin=AdminConfig(api_key="main", keys=keys(*ROLES)))
    for path in ("/reload", "/pause_generation", "/v1/rl/engine/any"):
        response = await api.client().post(path, headers={"Authorization": "Bearer main"})
        assert response.status_code == REACHED


async def test_a_refused_trainer_gets_the_error_at_the_top_level():
    response = await api_with().client().post("/pause_generation", headers=as_role("read"))
    body = await response.get_json()
    assert (response.status_code, body["success"], body["status"]) == (403, False, "error")
    assert body["message"] == (
        "POST /pause_generation needs an admin key with the role weights or all; "
        "'read' has the role read"
    )


async def test_a_listener_without_a_key_needs_no_role():
    admin = AdminConfig(keys=keys("read"), listen="127.0.0.1:1", listen_key=False)
    api = api_with("read", admin=admin)
    headers = {"Host": "admin", "X-Omni-Received": "tcp http 127.0.0.1:1"}
    response = await api.client().post("/reload", headers={**headers, **as_role("read")})
    assert response.status_code == REACHED


async def test_the_configuration_shows_no_hash_of_a_key():
    api = build_api(admin=AdminConfig(api_key="main", keys=keys("read")))
    response = await api.client().get("/config", headers={"Authorization": "Bearer main"})
    shown = (await response.get_json())["config"]["admin"]["keys"]
    assert [(key["name"], key["key_sha256"]) for key in shown] == [("read", "***")]


def test_the_documentation_shows_the_role_table():
    page = (Path(__file__).parents[3] / "docs/security.md").read_text()
    for row in ROLE_TABLE:
        methods = "" if row.methods == ANY_METHOD else f"{', '.join(row.methods)} "
        place = "engines: " if row.engine_only else ""
        paths = ", ".join(f"`{path.replace('*', '{id}')}`" for path in row.paths)
        marks = ["yes" if role in (*row.roles, "all") else "" for role in ROLES]
        assert f"| {place}{methods}{paths} | {' | '.join(marks)} |".replace("  ", " ") in page


@pytest.mark.parametrize("path", ["/server_info", "/get_model_info", "/v1/models", "/get_loads"])
async def test_no_admin_key_of_the_table_is_sent_to_a_worker(engines, path):
    entries = keys("operate")
    admin = AdminConfig(api_key="main", keys=entries)
    api = build_api(entry(A), admin=admin, services={"find_admin_key": KeyTable(entries).find})
    api.healthy(A)
    for token, forwarded in ((secret("operate"), False), ("main", True), ("of a client", True)):
        engines.requests.clear()
        await api.client().get(path, headers={"Authorization": f"Bearer {token}"})
        sent = [request.headers.get("authorization") for request in engines.requests]
        assert sent
        assert set(sent) == ({f"Bearer {token}"} if forwarded else {None})
