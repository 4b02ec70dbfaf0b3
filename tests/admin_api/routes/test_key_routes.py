from omni_proxy.config.tables.keys import CallerKey
from tests.admin_api.api_fixture import A, build_api, entry

USED = {
    "in_flight": 2, "requests": 7, "input_tokens": 30, "output_tokens": 40,
    "refused_max_inflight": 1, "refused_requests_per_minute": 0, "refused_tokens_per_minute": 0,
    "refused_model": 3,
}  # fmt: skip


async def test_callers_are_shown_with_limits_and_usage_but_no_hash():
    digest = "ab" * 32
    caller = CallerKey(name="team-a", key_sha256=digest, models=("m",), requests_per_minute=60)
    usage = {
        "team-a": USED,
        "": dict.fromkeys(USED, 0) | {"refused_max_inflight": 4, "refused_last_minute": 2},
    }
    api = build_api(entry(A), keys=(caller,), services={"usage": lambda: usage})
    response = await api.client().get("/keys")
    body = await response.get_json()
    (shown,) = body["keys"]
    assert (shown["name"], shown["models"], shown["requests_per_minute"]) == ("team-a", ["m"], 60)
    assert (shown["in_flight"], shown["requests"], shown["input_tokens"]) == (2, 7, 30)
    assert shown["refused"]["model"] == 3
    assert (body["refused_without_key"], body["error"]) == (4, None)
    for path in ("/keys", "/status", "/feed?once=true"):
        body = await (await api.client().get(path)).get_json()
        assert body["refused_without_key_last_minute"] == 2
    assert (body["key_required"], body["refused_without_key"]) == (True, 4)
    metrics = (await (await api.client().get("/metrics")).get_data()).decode()
    assert 'omni_proxy_key_refused_total{key="team-a",reason="model"} 3.0' in metrics
    assert 'omni_proxy_key_refused_total{key="",reason="invalid_api_key"} 4.0' in metrics
    assert 'omni_proxy_key_tokens_total{key="team-a",kind="output"} 40.0' in metrics
    assert digest not in str(body) + metrics


async def test_callers_are_not_shown_without_the_admin_key():
    api = build_api(entry(A), key="s3cret")
    assert (await api.client().get("/keys")).status_code == 401


async def test_a_caller_is_added_and_removed_over_http():
    digest = "cd" * 32
    file_caller = CallerKey(name="file", key_sha256="ab" * 32)
    api = build_api(entry(A), keys=(file_caller,))
    client = api.client()
    caller = {"name": "team/b", "key_sha256": digest, "models": ["m"], "requests_per_minute": 60}
    assert (await client.post("/keys", json=caller)).status_code == 200
    for other in (caller, caller | {"name": "c"}, caller | {"key_sha256": file_caller.key_sha256}):
        assert (await client.post("/keys", json=other)).status_code == 409
    shown = await (await client.get("/keys")).get_json()
    assert [(row["name"], row["origin"]) for row in shown["keys"]] == [
        ("file", "file"),
        ("team/b", "api"),
    ]
    assert digest not in str(shown) + str(await (await client.get("/config")).get_json())
    assert (await client.post("/keys", json={"name": "x", "key": "k"})).status_code == 400
    assert (await client.delete("/keys/file")).status_code == 409
    removed = await client.delete("/keys/team%2Fb")
    assert (await removed.get_json())["key_required"] is True
    assert (await client.delete("/keys/team%2Fb")).status_code == 404
