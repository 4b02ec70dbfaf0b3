import pytest

from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader
from tests.admin_api.api_fixture import A, B, build_api, entry


@pytest.fixture
def api():
    api = build_api(entry(A), entry(B), key="s3cret")
    api.data_plane.sessions = {"me": A, "you": A}
    return api


async def finish(api, query, **more):
    answer = await api.client().post(f"/finish_session{query}", **more)
    return answer.status_code, await answer.get_json()


async def test_finishing_is_answered_with_200_whether_or_not_it_was_known(api):
    reported = {"session_id": "me", "finished": True}
    assert await finish(api, "?session_id=me") == (200, reported)
    assert await finish(api, "?session_id=they") == (
        200,
        {"session_id": "they", "finished": False},
    )
    assert api.data_plane.finished == ["me", "they"]


@pytest.mark.parametrize("query", ["", "?session_id=", "?session_id=%20", "?id=me"])
async def test_a_request_that_names_no_session_is_informed_how(api, query):
    status, body = await finish(api, query)
    assert (status, "?session_id=" in body["error"]["message"]) == (400, True)
    assert api.data_plane.finished == []


@pytest.mark.parametrize(
    ("query", "sent"),
    [
        ("?session_id=%C3%A9", b"\xc3\xa9"),
        ("?session_id=%E9", b"\xe9"),
        ("?session_id=a+b%2B", b"a b+"),
        ("?x=1&session_id=" + "c" * 2000, b"c" * 2000),
    ],
)
async def test_the_id_is_the_key_that_a_header_with_the_same_bytes_is(api, query, sent):
    assert (await finish(api, query))[0] == 200
    read = AffinityKeyReader(("x-session-id",)).read
    assert api.data_plane.finished == [read(b"x-session-id: " + sent + b"\r\n")]


async def test_it_needs_no_key_and_answers_under_any_name(api):
    open_api = build_api(entry(A))
    for each in (api, open_api):
        received = {"X-Omni-Received": "tcp http router.svc.cluster.local:30000"}
        assert (await finish(each, "?session_id=me", headers=received))[0] == 200


async def test_a_page_of_another_origin_finishes_none():
    api = build_api(entry(A))
    received = {"X-Omni-Received": "tcp http router.svc:30000", "Origin": "http://evil.example"}
    assert (await finish(api, "?session_id=me", headers=received))[0] == 403
    assert api.data_plane.finished == []


async def test_worker_records_have_their_number_of_sessions(api):
    body = await (await api.client().get("/workers")).get_json()
    assert {row["url"]: row["sessions"] for row in body["workers"]} == {A: 2, B: 0}
    feed = await api.client().get("/feed?once=true", headers={"Authorization": "Bearer s3cret"})
    assert [row["sessions"] for row in (await feed.get_json())["fleet"]] == [2, 0]
