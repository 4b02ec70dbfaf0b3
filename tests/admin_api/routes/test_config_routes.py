from omni_proxy.config.problem import ConfigError, Problem
from tests.admin_api.api_fixture import A, Outcome, build_api, entry


async def test_the_configuration_is_shown_with_its_revision_and_without_keys():
    client = build_api(entry(A), key="s3cret").client()
    response = await client.get("/config", headers={"Authorization": "Bearer s3cret"})
    body = await response.get_json()
    assert response.headers["ETag"] == '"1"'
    assert list(body) == ["revision", "config", "last_reload"]
    assert body["config"]["admin"]["api_key"] == "***"
    assert body["config"]["workers"][0]["url"] == A


async def test_a_reload_reports_what_changed(api):
    api.config_store.next_reload = Outcome(
        "applied", 2, {"changed": {"health.interval_secs": [10, 5]}}
    )
    response = await api.client().post("/reload")
    assert (response.status_code, response.headers["ETag"]) == (200, '"2"')
    assert await response.get_json() == {
        "outcome": "applied",
        "revision": 2,
        "diff": {"changed": {"health.interval_secs": [10, 5]}},
    }


async def test_a_refused_file_gets_a_422_with_the_line(api):
    problem = Problem("server.prot", 12, "unknown key", "did you mean `port`?", "proxy.toml")
    error = ConfigError([problem], "proxy.toml")
    api.config_store.next_reload = Outcome("refused", 1, error=error)
    response = await api.client().post("/reload")
    body = await response.get_json()
    assert (response.status_code, body["error"]["code"]) == (422, "config_refused")
    assert "proxy.toml:12: server.prot: unknown key" in body["error"]["message"]
    assert body["refused"]["problems"][0]["line"] == 12
    assert body["revision"] == 1


async def test_a_reload_for_another_revision_gets_a_412(api):
    response = await api.client().post("/reload", headers={"If-Match": '"9"'})
    assert response.status_code == 412
    response = await api.client().post("/reload", headers={"If-Match": '"1"'})
    assert response.status_code == 200
