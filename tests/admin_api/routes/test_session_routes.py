import pytest

from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader
from tests.admin_api.api_fixture import A, B, build_api, entry


@pytest.fixture
def api():
    api = build_api(entry(A), entry(B), key="s3cret")
    api.data_plane.sessions = {"me": A, "you": A}
    return api


async def finish(api, query, **options):
    response = await api.client().post(f"/finish_session{query}", **options)
    return response.status_code, await response.get_json()


async def test_finishing_a_session_gets_a_200_even_if_it_is_unknown(api):
    finished = {"session_id": "me", "finished": True}
    assert await finish(api, "?session_id=me") == (200, finished)
    assert await finish(api, "?session_id=they") == (
        200,
        {"session_id": "they", "finished": False},
    )
    assert api.data_plane.finished == ["me", "they"]


@pytest.mark.parametrize("query", ["", "?session_id=", "?session_id=%20", "?id=me"])
async def test_a_request_without_a_session_id_gets_a_400_with_the_parameter(api, query):
    status, body = await finish(api, query)
    assert (status, "?session_id=" in body["error"]["message"]) == (400, True)
    assert api.data_plane.finished == []


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("?session_id=%C3%A9", b"\xc3\xa9"),
        ("?session_id=%E9", b"\xe9"),
        ("?session_id=a+b%2B", b"a b+"),
        ("?x=1&session_id=" + "c" * 2000, b"c" * 2000),
    ],
)
async def test_an_id_is_the_same_key_as_a_header_with_its_bytes(api, query, key):
    assert (await finish(api, query))[0] == 200
    read = AffinityKeyReader(("x-session-id",)).read
    assert api.data_plane.finished == [read(b"x-session-id: " + key + b"\r\n")]


async def test_finishing_needs_no_key_and_is_answered_under_any_host(api):
    open_api = build_api(entry(A))
    for either in (api, open_api):
        headers = {"X-Omni-Received": "tcp http router.svc.cluster.local:30000"}
        assert (await finish(either, "?session_id=me", headers=headers))[0] == 200


async def test_a_page_of_another_origin_finishes_no_session():
    api = build_api(entry(A))
    headers = {"X-Omni-Received": "tcp http router.svc:30000", "Origin": "http://evil.example"}
    assert (await finish(api, "?session_id=me", headers=headers))[0] == 403
    assert api.data_plane.finished == []


async def test_worker_records_have_a_number_of_sessions(api):
    body = await (await api.client().get("/workers")).get_json()
    assert {row["url"]: row["sessions"] for row in body["workers"]} == {A: 2, B: 0}
    feed = await api.client().get("/feed?once=true", headers={"Authorization": "Bearer s3cret"})
    assert [row["sessions"] for row in (await feed.get_json())["fleet"]] == [2, 0]
