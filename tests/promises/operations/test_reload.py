import shutil
import signal
import socket

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.support.fleet_program import (
    chat,
    program,
    put,
    record,
    routable,
    toml,
    urls,
    workers,
)


@pytest.fixture
async def pair():
    async with workers("one", "two") as fleet:
        yield fleet


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


async def test_a_write_in_two_steps_never_empties_the_fleet(file, pair):
    one, two = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        await running.until_routable(one)
        text = toml([one, two])
        cut = text.index("http://") + 3
        with file.open("w") as writer:
            writer.write(text[:cut])
            writer.flush()
            writer.write(text[cut:])
        await running.until_routable(one, two)
        reload = (await running.get_json("/config"))["last_reload"]
        assert reload["outcome"] == "applied"
        assert reload["diff"]["workers"] == {"added": [two.url], "removed": [], "changed": {}}


async def test_an_atomic_rename_is_detected(file, pair):
    one, two = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        put(file, toml([two]))
        await running.until("/workers", lambda body: urls(body) == [two.url])


async def test_a_deleted_file_keeps_the_configuration_until_it_is_restored(file, pair):
    one, two = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        await running.until_routable(one)
        file.unlink()
        body = await running.until("/config", lambda body: "error" in body["last_reload"])
        assert "cannot be read" in body["last_reload"]["error"]["message"]
        assert urls(await running.get_json("/workers")) == [one.url]
        file.write_text(toml([one, two]))
        await running.until_routable(one, two)
        assert "error" not in (await running.get_json("/config"))["last_reload"]


async def test_a_kubernetes_data_swap_is_detected(tmp_path, pair):
    one, two = pair
    mount = tmp_path / "etc"
    mount.mkdir()
    for version, fleet in (("..v1", [one]), ("..v2", [one, two])):
        (mount / version).mkdir()
        (mount / version / "proxy.toml").write_text(toml(fleet, more='state_file = "off"'))
    (mount / "..data").symlink_to("..v1")
    (mount / "proxy.toml").symlink_to("..data/proxy.toml")
    async with program("--config", mount / "proxy.toml") as running:
        await running.until_routable(one)
        (mount / "..data_tmp").symlink_to("..v2")
        (mount / "..data_tmp").rename(mount / "..data")
        shutil.rmtree(mount / "..v1")
        await running.until_routable(one, two)


async def test_sighup_reads_the_file_again(file, pair):
    put(file, toml(pair))
    async with program("--config", file) as running:
        running.process.send_signal(signal.SIGHUP)
        body = await running.until(
            "/config", lambda body: body["last_reload"]["source"] == "SIGHUP"
        )
        assert body["last_reload"]["outcome"] == "unchanged"
        assert body["revision"] == 1


async def test_post_reload_applies_at_once_and_raises_the_revision(file, pair):
    one, two = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        before = (await running.client.get("/config")).headers["etag"]
        put(file, toml([one, two]))
        response = await running.client.post("/reload")
        assert response.status_code == 200
        # The file watcher may be faster.
        assert response.json()["outcome"] in ("applied", "unchanged")
        assert response.headers["etag"] != before
        assert urls(await running.get_json("/workers")) == [one.url, two.url]


async def test_an_if_match_of_another_revision_gets_412(file, pair):
    put(file, toml(pair))
    async with program("--config", file) as running:
        etag = (await running.client.get("/config")).headers["etag"]
        stale = await running.client.post("/reload", headers={"if-match": '"77"'})
        assert (stale.status_code, stale.headers["etag"]) == (412, etag)
        assert stale.json()["error"]["code"] == "precondition_failed"
        fresh = await running.client.post("/reload", headers={"if-match": etag})
        assert (fresh.status_code, fresh.json()["outcome"]) == (200, "unchanged")


async def test_an_invalid_file_keeps_the_configuration_and_reports_its_error(file, pair):
    one, _ = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        await running.until_routable(one)
        put(file, toml([one], more="prot = 1\n[[workers]]\nurl = 3"))
        refused = await running.client.post("/reload")
        assert refused.status_code == 422
        for path in ("/config", "/status"):
            error = (await running.get_json(path))["last_reload"]["error"]
            assert "server.prot" in error["message"]
            assert "did you mean" in error["message"]
        assert (await running.ask()).json() == {"worker": "one"}
        put(file, toml([one]))
        assert (await running.client.post("/reload")).status_code == 200
        for path in ("/config", "/status"):
            assert "error" not in (await running.get_json(path))["last_reload"]
        await running.until_logged(r"server\.prot")


async def test_a_worker_that_stays_keeps_health_counts_and_connections(file, pair):
    one, two = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        await running.until_routable(one)
        await running.ask()
        before = record(await running.get_json("/workers"), one)
        put(file, toml([two, one], more="request_timeout_secs = 900"))
        await running.until_routable(one, two)
        after = record(await running.get_json("/workers"), one)
        unchanged = (
            "health_state",
            "since",
            "registered_at",
            "routed_requests",
            "successful_requests",
        )
        assert [after[key] for key in unchanged] == [before[key] for key in unchanged]
        while one.requests < 3:
            await running.ask()
        assert one.connections == 1


async def test_a_removed_worker_gets_no_new_requests_and_finishes_its_own(file, pair):
    one, two = pair
    put(file, toml([one]))
    async with program("--config", file) as running:
        await running.until_routable(one)
        one.gate = trio.Event()
        async with running.client.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as response:
            await one.halfway.wait()
            put(file, toml([two]))
            await running.until_routable(two)
            for _ in range(4):
                assert (await running.ask()).json() == {"worker": "two"}
            one.gate.set()
            text = "".join([line async for line in response.aiter_text()])
        assert text == "data: one\n\ndata: rest\n\ndata: [DONE]\n\n"
        assert one.requests == 1


async def test_a_new_port_opens_before_the_old_one_closes_and_connections_finish(file, pair):
    one, _ = pair
    first, second = free_port(), free_port()
    put(file, toml([one], port=first))
    async with program("--config", file) as running:
        await running.until_routable(one)
        one.gate = trio.Event()
        async with running.client.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as response:
            await one.halfway.wait()
            put(file, toml([one], port=second))
            await running.until_logged(f"listener_opened url=http://127.0.0.1:{second}")
            running.client.base_url = httpx.URL(f"http://127.0.0.1:{second}")
            body = await running.get_json("/status")
            assert body["listeners"] == [f"127.0.0.1:{second}"]
            with pytest.raises(OSError):
                await trio.open_tcp_stream("127.0.0.1", first)
            one.gate.set()
            text = "".join([line async for line in response.aiter_text()])
        assert text.endswith("data: [DONE]\n\n")


async def test_a_reload_with_a_port_in_use_changes_nothing(file, pair):
    one, two = pair
    put(file, toml([one]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with program("--config", file) as running:
            await running.until_routable(one)
            put(file, toml([one, two], port=taken.getsockname()[1]))
            refused = await running.client.post("/reload")
            assert refused.status_code == 422
            assert f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}" in refused.text
            body = await running.get_json("/workers")
            assert (urls(body), routable(body)) == ([one.url], {one.url})
            assert (await running.get_json("/config"))["config"]["server"]["port"] == 0


async def test_an_unreadable_file_keeps_the_configuration(file, pair):
    put(file, toml(pair))
    async with program("--config", file) as running:
        file.unlink()
        file.mkdir()
        refused = await running.client.post("/reload")
        assert (refused.status_code, "Is a directory" in refused.text) == (422, True)
        assert len(urls(await running.get_json("/workers"))) == 2
