import httpx
import pytest
import trio

from omni_proxy.admin_api.worker_arrivals import ROUTABLE_SECS
from omni_proxy.config.overlay import with_deleted
from tests.admin_api.house import NOW, A, B, build_house, entry

C = "http://127.0.0.1:8013"


async def said(house, method, path, **headers):
    answer = await getattr(house.client(), method)(path, headers=headers)
    return answer.status_code, (await answer.get_data()).decode(), answer


@pytest.mark.parametrize("query", [C, "http%3A%2F%2F127.0.0.1%3A8013"])
async def test_a_healthy_worker_is_added_with_the_sentence_that_scripts_match(
    house, engines, query
):
    engines.tell(C, "/health", {"status": "ok"})
    status, text, answer = await said(house, "post", f"/add_worker?url={query}")
    assert (status, text) == (200, f"Successfully added worker: {C}")
    assert answer.content_type.startswith("text/plain")
    assert house.worker(C).routable
    assert house.worker(C).origin == "api"


async def test_the_sentence_repeats_the_url_as_it_was_written(house, engines):
    engines.tell(C, "/health", {})
    _, text, _ = await said(house, "post", f"/add_worker?url={C}/")
    assert text == f"Successfully added worker: {C}/"
    assert house.fleet.find(C)


async def test_nothing_is_added_before_it_is_healthy(house, engines, autojump_clock):
    engines.says[C, "/health"] = [httpx.ConnectError("refused"), (503, b"loading"), (200, b"{}")]
    before = trio.current_time()
    status, _, _ = await said(house, "post", f"/add_worker?url={C}")
    assert status == 200
    assert len(engines.asked) == 3
    assert trio.current_time() > before


async def test_a_worker_that_stays_ill_is_refused_with_the_reason(house, engines, autojump_clock):
    engines.tell(C, "/health", b"loading", status=503)
    status, text, _ = await said(house, "post", f"/add_worker?url={C}&timeout_secs=3")
    assert status == 400
    assert "did not become healthy within 3 s: status=503" in text
    assert house.fleet.find(C) is None


async def test_a_refused_connection_is_told_in_the_words_of_the_fault(
    house, engines, autojump_clock
):
    engines.says[C, "/health"] = [httpx.ConnectError("Connection refused")]
    _, text, _ = await said(house, "post", f"/add_worker?url={C}&timeout_secs=3")
    assert "within 3 s: ConnectError: Connection refused" in text


async def test_a_worker_that_says_nothing_at_all_is_said_not_to_have_answered(
    house, engines, monkeypatch, autojump_clock
):
    async def never(request):
        await trio.sleep_forever()

    monkeypatch.setattr(engines, "answer", never)
    _, text, _ = await said(house, "post", f"/add_worker?url={C}&timeout_secs=3")
    assert "did not become healthy within 3 s: it has not answered" in text


async def test_of_two_that_add_the_same_worker_one_hears_what_scripts_match(
    house, engines, autojump_clock
):
    loading, well = (503, b"loading"), (200, b"{}")
    engines.says[C, "/health"] = [loading, loading, well, well]
    heard = []

    async def add():
        heard.append((await said(house, "post", f"/add_worker?url={C}"))[:2])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(add)
        nursery.start_soon(add)
    (good, bad) = sorted(heard)
    assert good == (200, f"Successfully added worker: {C}")
    assert bad[0] == 400
    assert "Worker URL already exists" in bad[1]


@pytest.mark.parametrize("fate", ["dies", "is removed"])
async def test_waiting_for_a_new_worker_ends_when_nobody_probes_it_any_more(
    house, engines, monkeypatch, autojump_clock, fate
):
    engines.tell(C, "/health", {"status": "ok"})
    asked = []

    async def probe_once(worker):
        asked.append(worker)
        assert len(asked) < 10, "asked again and again"
        if fate == "dies":
            house.fleet.mark_dead(worker, NOW)
        else:
            state = with_deleted(house.config_store.state, house.config_store.config, C)
            await house.config_store.change(lambda *_: state)
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(house.prober, "probe_once", probe_once)
    status, _, _ = await said(house, "post", f"/add_worker?url={C}")
    assert status == 200
    assert len(asked) == 1


async def test_a_new_worker_that_is_not_believed_is_probed_with_pauses_and_then_left_alone(
    house, engines, monkeypatch, autojump_clock
):
    engines.tell(C, "/health", {"status": "ok"})

    async def probe_once(worker):
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(house.prober, "probe_once", probe_once)
    before = trio.current_time()
    status, _, _ = await said(house, "post", f"/add_worker?url={C}")
    assert status == 200
    assert trio.current_time() - before >= ROUTABLE_SECS


async def test_who_removes_what_another_has_just_removed_hears_of_no_fault(house, monkeypatch):
    change = house.config_store.change

    async def behind_another(edit, *more, **named):
        await change(lambda state, config: with_deleted(state, config, B))
        return await change(edit, *more, **named)

    monkeypatch.setattr(house.config_store, "change", behind_another)
    status, text, _ = await said(house, "post", f"/remove_worker?url={B}")
    assert (status, text) == (200, f"Successfully removed worker: {B}")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "missing field `url`"),
        ("?url=", "missing field `url`"),
        (f"?url={A}", "Worker URL already exists"),
        ("?url=ftp://h:1", "url "),
        ("?url=http://169.254.169.254", "url "),
        (f"?url={C}&timeout_secs=0", "timeout_secs must be a number"),
        (f"?url={C}&timeout_secs=nan", "timeout_secs must be a number"),
        (f"?url={C}&api_key=secret", "api_key is not taken over HTTP"),
    ],
)
async def test_a_bad_addition_says_what_is_wrong_and_changes_nothing(house, engines, query, words):
    status, text, _ = await said(house, "post", f"/add_worker{query}")
    assert status == 400
    assert words in text
    assert "secret" not in text
    assert [worker.url for worker in house.fleet.workers] == [A, B]


async def test_a_removed_worker_is_gone_and_removing_again_is_no_fault(house, engines):
    for _ in range(2):
        status, text, _ = await said(house, "post", f"/remove_worker?url={B}")
        assert (status, text) == (200, f"Successfully removed worker: {B}")
    answer = await house.client().get("/list_workers")
    assert await answer.get_json() == {"urls": [A]}


async def test_changes_need_the_key_and_the_list_does_not(engines):
    house = build_house(entry(A), key="k")
    for path in ("/add_worker", "/remove_worker"):
        assert (await said(house, "post", f"{path}?url={A}"))[0] == 401
    assert (await said(house, "get", "/list_workers"))[0] == 200
    wanted = f"/remove_worker?url={A}"
    assert (await said(house, "post", wanted, Authorization="Bearer k"))[0] == 200


async def posted(house, path, body):
    answer = await house.client().post(path, json=body)
    return answer.status_code, await answer.get_json()


@pytest.mark.parametrize("key", ["url", "worker_url"])
async def test_a_worker_in_a_json_body_is_added_and_removed_as_often_as_it_is_said(
    house, engines, key
):
    engines.tell(C, "/health", {})
    for _ in range(2):
        status, told = await posted(house, "/add_worker", {key: C})
        assert (status, told["status"]) == (200, "success")
        assert told["worker_urls"][C] == 0
    assert house.worker(C).routable
    for _ in range(2):
        status, told = await posted(house, "/remove_worker", {key: C})
        assert (status, told["status"], C in told["worker_urls"]) == (200, "success", False)
    assert house.fleet.find(C) is None


@pytest.mark.parametrize("body", [{}, {"url": 7}, {"url": " "}])
async def test_a_json_body_without_a_worker_is_refused(house, body):
    status, told = await posted(house, "/add_worker", body)
    assert (status, told["error"]["code"]) == (400, "missing_url")
