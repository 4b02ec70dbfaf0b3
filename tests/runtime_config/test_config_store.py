import stat
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.config.api_keys import SavedKey
from omni_proxy.config.flags import Startup
from omni_proxy.config.overlay import with_added, with_deleted, with_override
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.state import with_key
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry, heal

A, B = "http://a:1", "http://b:1"


def toml(*urls: str, more: str = "") -> str:
    return more + "".join(f'\n[[workers]]\nurl = "{url}"\n' for url in urls)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "proxy.toml"
    path.write_text(toml(A))
    return path


def store_of(file, **overrides) -> ConfigStore:
    config_store = ConfigStore(Startup(file, overrides, (), ""), Fleet())
    config_store.start()
    return config_store


@pytest.fixture
def config_store(file):
    return store_of(file)


def urls(config_store) -> list[str]:
    return [worker.url for worker in config_store.fleet.workers]


async def test_a_reload_applies_and_reports_what_changed(file, config_store):
    heard = []
    config_store.subscribe(lambda old, new: heard.append((old.health, new.health)))
    file.write_text(toml(B, more="[health]\ninterval_secs = 7\n"))
    reported = await config_store.reload("file")
    assert (reported.outcome, reported.revision, config_store.revision) == ("applied", 2, 2)
    assert reported.diff["changed"] == {"health.interval_secs": [10, 7]}
    assert (urls(config_store), len(heard)) == ([B], 1)
    assert config_store.last_reload["source"] == "file"


async def test_a_reload_of_the_same_changes_nothing(config_store):
    fleet_revision = config_store.fleet.revision
    assert (await config_store.reload("SIGHUP")).outcome == "unchanged"
    assert (config_store.revision, config_store.fleet.revision) == (1, fleet_revision)


async def test_a_refused_file_changes_nothing_and_is_remembered_until_the_next_good_reading(
    file, config_store
):
    file.write_text("server.prot = 1\nworkers = 7")
    reported = await config_store.reload("file")
    assert (reported.outcome, config_store.revision, urls(config_store)) == ("refused", 1, [A])
    problems = config_store.last_reload["error"]["problems"]
    assert [problem["path"] for problem in problems] == ["server.prot", "workers"]
    await config_store.change(lambda state, _: with_override(state, A, disabled=True))
    assert "error" in config_store.last_reload  # what HTTP changes is no reading of the file
    file.write_text(toml(A))
    await config_store.reload("file")
    assert "error" not in config_store.last_reload


async def test_flags_stand_over_every_reload(file):
    config_store = store_of(file, **{"health.interval_secs": "3"})
    file.write_text(toml(A, more="[health]\ninterval_secs = 99\ntimeout_secs = 1\n"))
    assert (await config_store.reload("file")).outcome == "applied"
    assert (config_store.config.health.interval_secs, config_store.config.health.timeout_secs) == (
        3,
        1,
    )


async def test_what_cannot_be_bound_is_refused_before_anything_changed(file, config_store):
    committed = []

    def prepare(new):
        if new.server.port == 1:
            raise OSError(98, "Address already in use")
        return lambda: committed.append(new.server.port)

    config_store.add_prepare(prepare)
    config_store.subscribe(lambda old, new: committed.append("reported"))
    file.write_text(toml(A, B, more="server.port = 1\n"))
    reported = await config_store.reload("file")
    assert (reported.outcome, urls(config_store), committed) == ("refused", [A], [])
    assert "cannot listen on 127.0.0.1:1: Address already in use" in str(reported.error)
    file.write_text(toml(A, B, more="server.port = 2\n"))
    assert (await config_store.reload("file")).outcome == "applied"
    assert committed == [2, "reported"]


async def test_a_failing_subscriber_stops_no_other_and_is_called_again(file, config_store, caplog):
    faults, heard, enters = [RuntimeError("no thread")], [], [OSError(28, "no watch")]

    def fail(old, new):
        heard.append((old.health.interval_secs, new.health.interval_secs))
        if faults:
            raise faults.pop()

    def enter():
        if enters:
            raise enters.pop()

    config_store.add_prepare(lambda new: enter)
    config_store.subscribe(fail)
    config_store.subscribe(lambda old, new: heard.append("the other"))
    file.write_text(toml(A, B, more="[health]\ninterval_secs = 7\n"))
    reported = await config_store.reload("file")
    assert (reported.outcome, urls(config_store), heard) == (
        "applied",
        [A, B],
        [(10, 7), "the other"],
    )
    incomplete = config_store.last_reload["incomplete"]
    assert incomplete == "OSError: [Errno 28] no watch; RuntimeError: no thread"
    assert "config_subscriber_failed" in caplog.text
    heard.clear()
    assert (await config_store.reload("SIGHUP")).outcome == "applied"
    assert heard == [(10, 7), "the other"]
    assert "incomplete" not in config_store.last_reload
    assert (await config_store.reload("SIGHUP")).outcome == "unchanged"


async def test_a_start_that_a_part_cannot_take_fails(file):
    config_store = ConfigStore(Startup(file, {}, (), ""), Fleet())
    config_store.subscribe(lambda old, new: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        config_store.start()


@pytest.mark.parametrize("tag", ['"1"', "*", '"7", "1"', " 1 "])
async def test_if_match_that_names_the_revision_passes(config_store, tag):
    assert (await config_store.reload("http", tag)).outcome == "unchanged"


@pytest.mark.parametrize("tag", ['"2"', "", '"11"', 'W/"1"'])
async def test_if_match_of_another_revision_stops_every_change(file, config_store, tag):
    file.write_text(toml(B))
    reported = await config_store.reload("http", tag)
    assert (reported.outcome, reported.revision) == ("precondition_failed", 1)

    def edit(state, _):
        raise AssertionError("must not be asked")

    assert (await config_store.change(edit, tag)).outcome == "precondition_failed"
    assert urls(config_store) == [A]


async def test_a_worker_that_stays_keeps_its_object_and_health(file, config_store):
    worker = config_store.fleet.find(A)
    heal(config_store.fleet, worker)
    worker.in_flight = 3
    file.write_text(toml(B, A, more='[routing]\nmodel = "m"\n'))
    await config_store.reload("file")
    assert config_store.fleet.find(A) is worker
    assert (worker.health.state, worker.in_flight, worker.model) == (Health.HEALTHY, 3, "m")


async def test_thresholds_follow_the_configuration(file, config_store):
    file.write_text(
        toml(A, more='[health]\nfailure_threshold = 9\non_threshold = "unhealthy"\n'
             '[routing]\neject = "dead"\n')
    )  # fmt: skip
    await config_store.reload("file")
    thresholds = config_store.fleet.thresholds
    assert (thresholds.fall, thresholds.on_threshold, thresholds.eject) == (
        9, Health.UNHEALTHY, Health.DEAD,
    )  # fmt: skip


async def test_changes_over_http_are_saved_and_loaded_again(file, config_store, tmp_path):
    await config_store.change(lambda state, _: with_added(state, entry("b", origin="api")))
    await config_store.change(lambda state, config: with_deleted(state, config, A))
    saved = tmp_path / "proxy.state.toml"
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert urls(config_store) == urls(store_of(file)) == [B]


async def test_a_caller_that_was_added_outlasts_reloads_and_the_program_until_the_file_names_it(
    file, config_store
):
    heard = []
    config_store.subscribe(lambda old, new: heard.append([key.name for key in new.keys]))
    key = SavedKey(name="team-a", key_sha256="ab" * 32)
    await config_store.change(partial(with_key, key))
    assert heard == [["team-a"]]
    file.write_text(toml(A, B))
    await config_store.reload("file")
    assert config_store.config.keys == (key,)
    assert store_of(file).config.keys == (key,)
    entry_of_file = f'\n[[keys]]\nname = "team-a"\nkey_sha256 = "{"cd" * 32}"\n'
    file.write_text(toml(A) + entry_of_file)
    await config_store.reload("file")
    file.write_text(toml(A))
    await config_store.reload("file")
    assert config_store.config.keys == ()


async def test_an_added_and_deleted_worker_leaves_the_state_as_it_was(config_store):
    await config_store.change(lambda state, _: with_added(state, entry("b", origin="api")))
    await config_store.change(lambda state, config: with_deleted(state, config, B))
    assert (await config_store.reload("file")).outcome == "unchanged"


async def test_an_edit_that_raises_changes_nothing(config_store):
    def edit(state, _):
        raise LookupError("no such worker")

    with pytest.raises(LookupError):
        await config_store.change(edit)
    assert config_store.revision == 1
    assert (await config_store.reload("file")).outcome == "unchanged"  # and the lock is free


async def test_concurrent_changes_are_serialized(config_store, autojump_clock):
    reported = []

    async def add(name):
        changed = await config_store.change(
            lambda state, _: with_added(state, entry(name, origin="api")), '"1"'
        )
        reported.append(changed.outcome)

    async with trio.open_nursery() as nursery:
        for name in "bcd":
            nursery.start_soon(add, name)
    assert sorted(reported) == ["applied", "precondition_failed", "precondition_failed"]


def with_b(state, _):
    return with_added(state, entry("b", origin="api"))


async def test_a_change_is_saved_though_its_caller_disconnects(file, config_store):
    config_store.fleet.await_replicated = trio.sleep_forever
    with trio.CancelScope() as asker:
        config_store.fleet.watch(asker.cancel)
        await config_store.change(with_b)
    assert urls(config_store) == urls(store_of(file)) == [A, B]


async def test_a_state_that_could_not_be_written_is_with_the_next_reading(file, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    file.write_text(toml(A, more=f'server.state_file = "{blocked}/s.toml"\n'))
    config_store = store_of(file)
    assert (await config_store.change(with_b)).outcome == "applied"
    assert urls(config_store) == [A, B]
    assert config_store.state_error == f"{blocked}/s.toml: File exists"
    blocked.unlink()
    assert (await config_store.reload("SIGHUP")).outcome == "unchanged"
    assert config_store.state_error == ""
    assert urls(store_of(file)) == [A, B]


async def test_the_state_moves_with_its_file(file, config_store, tmp_path):
    await config_store.change(with_b)
    file.write_text(toml(A, more=f'server.state_file = "{tmp_path}/new.toml"\n'))
    await config_store.reload("file")
    assert urls(store_of(file)) == [A, B]


def test_an_unreadable_file_at_the_start_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        store_of(tmp_path / "missing.toml")


async def test_changes_wait_for_the_turn_in_their_order_and_those_at_once_do_not(
    file, config_store
):
    done = []

    async def note(name, change):
        await change
        done.append(name)

    async with trio.open_nursery() as nursery:
        await config_store.operation_lock.acquire()
        file.write_text(toml(B))
        nursery.start_soon(note, "reload", config_store.reload("file"))
        await wait_all_tasks_blocked()
        nursery.start_soon(note, "change", config_store.change(lambda state, _: state))
        await wait_all_tasks_blocked()

        def disable(state, _):
            return with_override(state, A, disabled=True)

        await note("at once", config_store.change(disable, at_once=True))
        await wait_all_tasks_blocked()
        assert done == ["at once"]
        assert (urls(config_store), config_store.fleet.find(A).disabled) == ([A], True)
        config_store.operation_lock.release()
    assert done == ["at once", "reload", "change"]
    assert urls(config_store) == [B]
    assert config_store.operation_lock.locked() is False


async def test_what_a_reload_did_is_still_reported_after_the_watcher_has_read_again(
    file, config_store
):
    file.write_text("[health]\ninterval_secs = 7\n")
    assert (await config_store.reload("http")).outcome == "applied"
    reported = config_store.last_reload
    assert (await config_store.reload("file")).outcome == "unchanged"
    assert config_store.last_reload == reported
    file.write_text("[health]\ninterval_sec = 7\n")
    assert (await config_store.reload("file")).outcome == "refused"
    file.write_text("[health]\ninterval_secs = 7\n")
    await config_store.reload("file")
    assert config_store.last_reload["outcome"] == "unchanged"
    assert "error" not in config_store.last_reload


def reason():
    return "group 'g' at host:1, begun 3 s ago, step armed"


async def test_while_it_is_frozen_all_but_the_set_of_workers_follows_the_file(file, config_store):
    config_store.membership_lock.acquire(reason)
    file.write_text(toml(A, B, more="[health]\ninterval_secs = 7\n"))
    reported = await config_store.reload("file")
    assert (reported.outcome, urls(config_store)) == ("applied", [A])
    assert config_store.config.health.interval_secs == 7
    assert reason() in config_store.last_reload["waits"]
    file.write_text(toml(B, more="[health]\ninterval_secs = 8\n"))
    await config_store.reload("file")
    assert (urls(config_store), config_store.config.health.interval_secs) == ([A], 8)
    await config_store.release_membership()
    assert urls(config_store) == [B]
    assert "waits" not in config_store.last_reload


async def test_a_file_that_takes_its_change_back_has_nothing_that_waits(file, config_store):
    config_store.membership_lock.acquire(reason)
    file.write_text(toml(A, B))
    await config_store.reload("file")
    file.write_text(toml(A))
    await config_store.reload("file")
    assert "waits" not in config_store.last_reload
    await config_store.release_membership()
    assert urls(config_store) == [A]


async def test_under_the_membership_lock_workers_change_state_only(
    config_store, nursery, autojump_clock
):
    config_store.membership_lock.acquire(reason)
    await config_store.change(lambda state, _: with_override(state, A, disabled=True))
    assert config_store.fleet.find(A).disabled
    added = trio.Event()

    async def add():
        await config_store.change(lambda state, _: with_added(state, entry("b", origin="api")))
        added.set()

    nursery.start_soon(add)
    await trio.sleep(100)
    assert (added.is_set(), urls(config_store)) == (False, [A])
    await config_store.release_membership()
    await added.wait()
    assert urls(config_store) == [A, B]


async def test_a_change_that_waits_too_long_for_the_membership_lock_gets_its_reason(
    config_store, autojump_clock
):
    config_store.membership_lock.acquire(reason)
    with pytest.raises(HttpError) as refused:
        await config_store.change(lambda state, config: with_deleted(state, config, A))
    assert refused.value.status == 503
    assert reason() in refused.value.message
    assert ("retry-after", "5") in refused.value.headers
    assert trio.current_time() >= config_store.config.admin.lock_timeout_secs
    assert urls(config_store) == [A]


async def test_a_change_stops_waiting_for_the_operation_lock_when_membership_is_locked(
    file, config_store, nursery
):
    await config_store.operation_lock.acquire()
    file.write_text(toml(A, more="[health]\ninterval_secs = 7\n"))
    nursery.start_soon(config_store.reload, "file")
    await wait_all_tasks_blocked()
    assert config_store.config.health.interval_secs == 10
    config_store.membership_lock.acquire(reason)
    with trio.fail_after(30):
        while config_store.config.health.interval_secs != 7:  # noqa: ASYNC110  # read in a thread
            await trio.sleep(0.01)
    config_store.operation_lock.release()
