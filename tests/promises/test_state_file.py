import stat
import tomllib
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import trio

from tests.program_forkserver import forking_interpreter
from tests.promises.fleet_program import (
    PATIENCE_SECS,
    Program,
    Worker,
    program,
    put,
    record,
    toml,
    urls,
    workers,
)


@pytest.fixture
async def trio_of_workers():
    async with workers("one", "two", "three") as made:
        yield made


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


@pytest.fixture
def state(tmp_path):
    return tmp_path / "proxy.state.toml"


def path(worker: Worker) -> str:
    return "/workers/" + quote(worker.url, safe="")


async def add(running: Program, worker: Worker, **fields: object) -> httpx.Response:
    answer = await running.client.post("/workers", json={"url": worker.url, **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def switch(running: Program, worker: Worker, **fields: object) -> None:
    answer = await running.client.put(path(worker), json=fields)
    assert answer.status_code == 200, answer.text


async def delete(running: Program, worker: Worker) -> None:
    assert (await running.client.delete(path(worker))).status_code == 200


async def test_what_http_changed_survives_a_restart_and_file_is_never_written(
    file, state, trio_of_workers
):
    one, two, three = trio_of_workers
    text = toml([one, two])
    put(file, text)
    file.chmod(0o400)
    before = file.stat()
    async with program("--config", file) as running:
        await add(running, three, model="extra", capabilities=["chat", "streaming"])
        await switch(running, one, disabled=True)
        await delete(running, two)
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
    async with program("--config", file) as running:
        body = await running.until_routable(three)
        assert urls(body) == [one.url, three.url]
        added, switched = record(body, three), record(body, one)
        assert (added["origin"], added["model"]) == ("api", "extra")
        assert added["capabilities"] == ["chat", "streaming"]
        assert (switched["origin"], switched["disabled"]) == ("file", True)
    assert file.read_text() == text
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


async def test_a_tombstone_holds_while_the_entry_stays_and_ends_when_it_changes(
    file, state, trio_of_workers
):
    one, two, _ = trio_of_workers
    put(file, toml([one, two]))
    async with program("--config", file) as running:
        await delete(running, two)
        assert list(tomllib.loads(state.read_text())["tombstones"]) == [two.url]
        put(file, "# an edit elsewhere\n" + toml([one, two]))
        await running.client.post("/reload")
        assert urls(await running.get_json("/workers")) == [one.url]
        put(file, toml([one, two]) + 'model = "new"\n')
        await running.client.post("/reload")
        assert urls(await running.get_json("/workers")) == [one.url, two.url]
        assert "tombstones" not in state.read_text()


async def test_a_deleted_worker_of_the_file_returns_by_post(file, trio_of_workers):
    one, *_ = trio_of_workers
    put(file, toml([one]))
    async with program("--config", file) as running:
        await delete(running, one)
        assert (await running.client.get(path(one))).status_code == 404
        await add(running, one)
        assert urls(await running.get_json("/workers")) == [one.url]


async def test_a_worker_that_http_added_and_deleted_leaves_no_trace(file, state, trio_of_workers):
    one, two, _ = trio_of_workers
    put(file, toml([one]))
    async with program("--config", file) as running:
        await add(running, two)
        await delete(running, two)
        assert tomllib.loads(state.read_text()) == {}
        assert (await running.client.post("/reload")).json()["outcome"] == "unchanged"


async def test_a_deleted_flag_worker_stays_away_until_the_next_start(trio_of_workers, tmp_path):
    one, two, _ = trio_of_workers
    words = ("--worker-urls", one.url, two.url, "--port", "0")
    async with program(*words) as running:
        await delete(running, two)
        await running.client.post("/reload")
        assert urls(await running.get_json("/workers")) == [one.url]
    async with program(*words) as running:
        assert urls(await running.get_json("/workers")) == [one.url, two.url]


async def test_a_worker_change_honours_if_match(file, trio_of_workers):
    one, two, _ = trio_of_workers
    put(file, toml([one]))
    async with program("--config", file) as running:
        body = {"url": two.url}
        stale = await running.client.post("/workers", json=body, headers={"if-match": '"9"'})
        assert stale.status_code == 412
        fresh = {"if-match": stale.headers["etag"]}
        assert (await running.client.post("/workers", json=body, headers=fresh)).is_success
        again = await running.client.delete(path(one), headers=fresh)
        assert (again.status_code, len(urls(await running.get_json("/workers")))) == (412, 2)


async def test_a_state_that_cannot_be_saved_is_shown_and_the_change_still_holds(
    file, trio_of_workers, tmp_path
):
    one, two, _ = trio_of_workers
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    put(file, toml([one], more=f'state_file = "{blocked}/state.toml"'))
    async with program("--config", file) as running:
        answer = await add(running, two)
        output = f"the change is active but not saved, a restart will lose it: {blocked}/state.toml"
        assert answer.json()["warning"].startswith(output)
        assert answer.headers["x-omni-warning"] == answer.json()["warning"]
        removed = await running.client.post("/remove_worker", params={"url": two.url})
        assert (removed.status_code, removed.headers["x-omni-warning"][:10]) == (200, "the change")
        answer = await add(running, two)
        assert urls(await running.get_json("/workers")) == [one.url, two.url]
        assert str(blocked) in (await running.get_json("/status"))["state_error"]
        blocked.unlink()
        assert (await running.client.post("/reload")).json()["outcome"] == "unchanged"
        assert (await running.get_json("/status"))["state_error"] is None
        assert "warning" not in (await running.client.delete(path(two))).json()
        assert "warning" not in (await add(running, two)).json()
    async with program("--config", file) as running:
        assert urls(await running.get_json("/workers")) == [one.url, two.url]


async def test_what_http_changed_moves_with_its_file_and_nothing_there_is_written_over(
    file, trio_of_workers, tmp_path
):
    one, two, _ = trio_of_workers
    there = tmp_path / "there.toml"
    there.write_text("# of another proxy\n")
    put(file, toml([one]))
    async with program("--config", file) as running:
        await add(running, two)
        put(file, toml([one], more=f'state_file = "{there}"'))
        await running.client.post("/reload")
    async with program("--config", file) as running:
        assert urls(await running.get_json("/workers")) == [one.url, two.url]
    assert there.with_name("there.toml.old").read_text() == "# of another proxy\n"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("[[workers]\n", "proxy.state.toml:1"),
        ('[[workers]]\nurl = "http://a:1"\ndisabeld = true\n', "did you mean `disabled`?"),
        ('[[workers]]\nurl = "ftp://a"\n', "workers[0].url"),
    ],
)
async def test_a_broken_state_file_prevents_the_start_with_a_remedy(file, state, broken, message):
    file.write_text(toml([]))
    state.write_text(broken)
    with trio.fail_after(PATIENCE_SECS):
        ended = await trio.run_process(
            [forking_interpreter(), "-m", "omni_proxy", "--config", str(file)],
            cwd=Path(__file__).parents[2],
            capture_stderr=True,
            check=False,
        )
    body = ended.stderr.decode()
    assert ended.returncode == 2
    assert message in body
    assert "proxy.state.toml" in body
    assert "delete it" in body
    assert state.read_text() == broken
