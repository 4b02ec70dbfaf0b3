import stat
import tomllib
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import trio

from tests.program_forkserver import forking_interpreter
from tests.promises.support.fleet_program import (
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
async def three_workers():
    async with workers("one", "two", "three") as fleet:
        yield fleet


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


@pytest.fixture
def state(tmp_path):
    return tmp_path / "proxy.state.toml"


def path_of(worker: Worker) -> str:
    return "/workers/" + quote(worker.url, safe="")


async def add(running: Program, worker: Worker, **fields: object) -> httpx.Response:
    response = await running.client.post("/workers", json={"url": worker.url, **fields})
    assert response.status_code == 200, response.text
    return response


async def switch(running: Program, worker: Worker, **fields: object) -> None:
    response = await running.client.put(path_of(worker), json=fields)
    assert response.status_code == 200, response.text


async def delete(running: Program, worker: Worker) -> None:
    assert (await running.client.delete(path_of(worker))).status_code == 200


async def test_changes_over_http_survive_a_restart_and_the_file_is_not_written(
    file, state, three_workers
):
    one, two, three = three_workers
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


async def test_a_tombstone_applies_until_its_entry_in_the_file_changes(file, state, three_workers):
    one, two, _ = three_workers
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


async def test_a_post_restores_a_deleted_worker_of_the_file(file, three_workers):
    one, *_ = three_workers
    put(file, toml([one]))
    async with program("--config", file) as running:
        await delete(running, one)
        assert (await running.client.get(path_of(one))).status_code == 404
        await add(running, one)
        assert urls(await running.get_json("/workers")) == [one.url]


async def test_a_worker_added_and_deleted_over_http_leaves_no_state(file, state, three_workers):
    one, two, _ = three_workers
    put(file, toml([one]))
    async with program("--config", file) as running:
        await add(running, two)
        await delete(running, two)
        assert tomllib.loads(state.read_text()) == {}
        assert (await running.client.post("/reload")).json()["outcome"] == "unchanged"


async def test_a_deleted_worker_of_the_flags_returns_at_the_next_start(three_workers, tmp_path):
    one, two, _ = three_workers
    arguments = ("--worker-urls", one.url, two.url, "--port", "0")
    async with program(*arguments) as running:
        await delete(running, two)
        await running.client.post("/reload")
        assert urls(await running.get_json("/workers")) == [one.url]
    async with program(*arguments) as running:
        assert urls(await running.get_json("/workers")) == [one.url, two.url]


async def test_a_worker_change_honours_if_match(file, three_workers):
    one, two, _ = three_workers
    put(file, toml([one]))
    async with program("--config", file) as running:
        body = {"url": two.url}
        stale = await running.client.post("/workers", json=body, headers={"if-match": '"9"'})
        assert stale.status_code == 412
        fresh = {"if-match": stale.headers["etag"]}
        assert (await running.client.post("/workers", json=body, headers=fresh)).is_success
        again = await running.client.delete(path_of(one), headers=fresh)
        assert (again.status_code, len(urls(await running.get_json("/workers")))) == (412, 2)


async def test_a_state_that_cannot_be_saved_is_reported_and_the_change_is_active(
    file, three_workers, tmp_path
):
    one, two, _ = three_workers
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    put(file, toml([one], more=f'state_file = "{blocked}/state.toml"'))
    async with program("--config", file) as running:
        response = await add(running, two)
        warning = (
            f"the change is active but not saved, a restart will lose it: {blocked}/state.toml"
        )
        assert response.json()["warning"].startswith(warning)
        assert response.headers["x-omni-warning"] == response.json()["warning"]
        removed = await running.client.post("/remove_worker", params={"url": two.url})
        assert (removed.status_code, removed.headers["x-omni-warning"][:10]) == (200, "the change")
        response = await add(running, two)
        assert urls(await running.get_json("/workers")) == [one.url, two.url]
        assert str(blocked) in (await running.get_json("/status"))["state_error"]
        blocked.unlink()
        assert (await running.client.post("/reload")).json()["outcome"] == "unchanged"
        assert (await running.get_json("/status"))["state_error"] is None
        assert "warning" not in (await running.client.delete(path_of(two))).json()
        assert "warning" not in (await add(running, two)).json()
    async with program("--config", file) as running:
        assert urls(await running.get_json("/workers")) == [one.url, two.url]


async def test_a_moved_state_file_keeps_its_changes_and_overwrites_no_other_file(
    file, three_workers, tmp_path
):
    one, two, _ = three_workers
    target = tmp_path / "there.toml"
    target.write_text("# of another proxy\n")
    put(file, toml([one]))
    async with program("--config", file) as running:
        await add(running, two)
        put(file, toml([one], more=f'state_file = "{target}"'))
        await running.client.post("/reload")
    async with program("--config", file) as running:
        assert urls(await running.get_json("/workers")) == [one.url, two.url]
    assert target.with_name("there.toml.old").read_text() == "# of another proxy\n"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("[[workers]\n", "proxy.state.toml:1"),
        ('[[workers]]\nurl = "http://a:1"\ndisabeld = true\n', "did you mean `disabled`?"),
        ('[[workers]]\nurl = "ftp://a"\n', "workers[0].url"),
    ],
)
async def test_an_invalid_state_file_prevents_the_start_and_the_error_has_a_remedy(
    file, state, broken, message
):
    file.write_text(toml([]))
    state.write_text(broken)
    with trio.fail_after(PATIENCE_SECS):
        process = await trio.run_process(
            [forking_interpreter(), "-m", "omni_proxy", "--config", str(file)],
            cwd=Path(__file__).parents[3],
            capture_stderr=True,
            check=False,
        )
    stderr = process.stderr.decode()
    assert process.returncode == 2
    assert message in stderr
    assert "proxy.state.toml" in stderr
    assert "delete it" in stderr
    assert state.read_text() == broken
