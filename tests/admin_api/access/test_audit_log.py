"""Which calls are written to the audit log, and with which fields."""

import json
from datetime import datetime

import pytest

from omni_proxy.config.schema import AdminConfig
from tests.admin_api.api_fixture import A, build_api, entry

KEY = {"Authorization": "Bearer s3cret"}
CONNECTION = {"X-Omni-Received": "tcp http 10.0.0.5:30000", "X-Omni-Peer": "10.0.0.7:51234"}


@pytest.fixture
def lines():
    return []


def audited(lines, key="s3cret", **tables):
    return build_api(entry(A), key=key, services={"write_audit": lines.append}, **tables)


async def records(api, lines, method, path, **options):
    await api.client().open(path, method=method, **options)
    return [json.loads(line) for line in lines]


async def test_a_change_is_logged_as_one_line(lines):
    api = audited(lines)
    request = {"json": {"url": "http://c.test:1"}, "headers": {**KEY, **CONNECTION}}
    (record,) = await records(api, lines, "POST", "/workers?x=1", **request)
    assert list(record) == ["at", "who", "from", "method", "path", "status"]
    assert datetime.fromisoformat(record.pop("at")).utcoffset().total_seconds() == 0
    assert record == {
        "who": "api_key", "from": "10.0.0.7:51234", "method": "POST", "path": "/workers?x=1",
        "status": 200,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "status", "who"),
    [
        ({}, 401, None),
        ({"Authorization": "Bearer wrong"}, 403, None),
        (KEY, 404, "api_key"),
    ],
)
async def test_a_refused_change_is_logged_too(lines, headers, status, who):
    (record,) = await records(audited(lines), lines, "DELETE", "/workers/x", headers=headers)
    assert (record["status"], record["who"]) == (status, who)


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_a_change_from_a_page_of_another_origin_is_logged_as_refused(lines, origin):
    headers = {**CONNECTION, "Origin": origin}
    (record,) = await records(audited(lines, ""), lines, "POST", "/reload", headers=headers)
    assert (record["status"], record["who"], record["path"]) == (403, None, "/reload")


async def test_a_get_that_changes_something_is_logged(lines):
    for path in ("/flush_cache?selector=a%3Db", "/v1/rl/engine/abort_request"):
        lines.clear()
        (record,) = await records(audited(lines), lines, "GET", path, headers=CONNECTION)
        assert record["path"] == path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/config"), ("GET", "/workers"), ("HEAD", "/status"), ("POST", "/explain"),
        ("POST", "/finish_session?session_id=x"), ("OPTIONS", "/workers"), ("OPTIONS", "/reload"),
        ("POST", "/nowhere"),
        ("DELETE", "/live"), ("GET", "/metrics"), ("GET", "/v1/rl/engine/health?selector=x!%3Dy"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("headers", [{}, KEY], ids=["without", "with"])
async def test_a_call_that_changes_nothing_is_not_logged(lines, method, path, headers):
    assert await records(audited(lines), lines, method, path, headers=headers) == []


async def test_secrets_and_control_characters_of_a_query_are_not_written(lines):
    api = audited(lines)
    path = "/add_worker?url=http://c.test:1&api_key=t0p&Token=t0p&x=%1b%e2"
    await api.client().post(path, headers=KEY)
    (line,) = lines
    assert b"t0p" not in line
    assert b"s3cret" not in line
    assert b"c.test" in line
    assert line.decode("ascii").isprintable()


async def test_a_line_is_bounded(lines):
    await audited(lines).client().delete("/workers/" + "x" * 20_000, headers=KEY)
    assert len(lines[0]) < 2500


async def test_a_client_of_a_unix_socket_cannot_claim_an_address(lines):
    claims = {"X-Omni-Received": "unix http admin", "X-Omni-Peer": "1.2.3.4:5"}
    (record,) = await records(audited(lines, ""), lines, "POST", "/reload", headers=claims)
    assert record["from"] == "unix"


async def test_a_call_on_a_listener_without_a_key_is_logged_without_a_name(lines):
    admin = AdminConfig(api_key="s3cret", listen="127.0.0.1:1", listen_key=False)
    api = audited(lines, admin=admin)
    headers = {"Host": "admin", **CONNECTION}
    (record,) = await records(api, lines, "POST", "/reload", headers=headers)
    assert (record["status"], record["who"]) == (200, None)
