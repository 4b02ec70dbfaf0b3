import stat
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.overlay import with_added, with_deleted, with_override
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.state import with_key
from omni_proxy.config.tables.keys import SavedKey
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
    notified = []
    config_store.subscribe(lambda old, new: notified.append((old.health, new.health)))
    file.write_text(toml(B, more="[health]\ninterval_secs = 7\n"))
    result = await config_store.reload("file")
    assert (result.outcome, result.revision, config_store.revision) == ("applied", 2, 2)
    assert result.diff["changed"] == {"health.interval_secs": [10, 7]}
    assert (urls(config_store), len(notified)) == ([B], 1)
    assert config_store.last_reload["source"] == "file"


async def test_a_reload_of_an_unchanged_file_changes_nothing(config_store):
    fleet_revision = config_store.fleet.revision
    assert (await config_store.reload("SIGHUP")).outcome == "unchanged"
    assert (config_store.revision, config_store.fleet.revision) == (1, fleet_revision)


async def test_a_refused_file_changes_nothing_and_is_shown_until_a_valid_one_is_read(
    file, config_store
):
    file.write_text("server.prot = 1\nworkers = 7")
    result = await config_store.reload("file")
    assert (result.outcome, config_store.revision, urls(config_store)) == ("refused", 1, [A])
    problems = config_store.last_reload["error"]["problems"]
    assert [problem["path"] for problem in problems] == ["server.prot", "workers"]
    await config_store.change(lambda state, _: with_override(state, A, disabled=True))
    assert "error" in config_store.last_reload  # a change over HTTP does not read the file
    file.write_text(toml(A))
    await config_store.reload("file")
    assert "error" not in config_store.last_reload


async def test_flags_override_the_file_at_every_reload(file):
    config_store = store_of(file, **{"health.interval_secs": "3"})
    file.write_text(toml(A, more="[health]\ninterval_secs = 99\ntimeout_secs = 1\n"))
    assert (await config_store.reload("file")).outcome == "applied"
    assert (config_store.config.health.interval_secs, config_store.config.health.timeout_secs) == (
        3,
        1,
    )


async def test_an_address_that_cannot_be_bound_is_refused_before_any_change(file, config_store):
    committed = []

    def prepare(new):
        if new.server.port == 1:
            raise OSError(98, "Address already in use")
        return lambda: committed.append(new.server.port)

    config_store.add_prepare(prepare)
    config_store.subscribe(lambda old, new: committed.append("subscriber"))
    file.write_text(toml(A, B, more="server.port = 1\n"))
    result = await config_store.reload("file")
    assert (result.outcome, urls(config_store), committed) == ("refused", [A], [])
    assert "cannot listen on 127.0.0.1:1: Address already in use" in str(result.error)
    file.write_text(toml(A, B, more="server.port = 2\n"))
    assert (await config_store.reload("file")).outcome == "applied"
    assert committed == [2, "subscriber"]


async def test_a_failing_subscriber_does_not_stop_others_and_is_called_again(
    file, config_store, caplog
):
    subscriber_errors, calls, commit_errors = (
        [RuntimeError("no thread")],
        [],
        [OSError(28, "no watch")],
    )

    def fail(old, new):
        calls.append((old.health.interval_secs, new.health.interval_secs))
        if subscriber_errors:
            raise subscriber_errors.pop()

    def commit():
        if commit_errors:
            raise commit_errors.pop()

    config_store.add_prepare(lambda new: commit)
    config_store.subscribe(fail)
    config_store.subscribe(lambda old, new: calls.append("the other"))
    file.write_text(toml(A, B, more="[health]\ninterval_secs = 7\n"))
    result = await config_store.reload("file")
    assert (result.outcome, urls(config_store), calls) == (
        "applied",
        [A, B],
        [(10, 7), "the other"],
    )
    incomplete = config_store.last_reload["incomplete"]
    assert incomplete == "OSError: [Errno 28] no watch; RuntimeError: no thread"
    assert "config_subscriber_failed" in caplog.text
    calls.clear()
    assert (await config_store.reload("SIGHUP")).outcome == "applied"
    assert calls == [(10, 7), "the other"]
    assert "incomplete" not in config_store.last_reload
    assert (await config_store.reload("SIGHUP")).outcome == "unchanged"


async def test_a_start_fails_if_a_subscriber_fails(file):
    config_store = ConfigStore(Startup(file, {}, (), ""), Fleet())
    config_store.subscribe(lambda old, new: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        config_store.start()


@pytest.mark.parametrize("tag", ['"1"', "*", '"7", "1"', " 1 "])
async def test_if_match_that_names_the_revision_passes(config_store, tag):
    assert (await config_store.reload("http", tag)).outcome == "unchanged"


@pytest.mark.parametrize("tag", ['"2"', "", '"11"', 'W/"1"'])
async def test_if_match_of_another_revision_refuses_every_change(file, config_store, tag):
    file.write_text(toml(B))
    result = await config_store.reload("http", tag)
    assert (result.outcome, result.revision) == ("precondition_failed", 1)

    def edit(state, _):
        raise AssertionError("must not be called")

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


async def test_an_added_key_survives_reloads_and_restarts_until_the_file_has_it(file, config_store):
    key_names = []
    config_store.subscribe(lambda old, new: key_names.append([key.name for key in new.keys]))
    key = SavedKey(name="team-a", key_sha256="ab" * 32)
    await config_store.change(partial(with_key, key))
    assert key_names == [["team-a"]]
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


async def test_adding_and_deleting_a_worker_restores_the_state(config_store):
    await config_store.change(lambda state, _: with_added(state, entry("b", origin="api")))
    await config_store.change(lambda state, config: with_deleted(state, config, B))
    assert (await config_store.reload("file")).outcome == "unchanged"


async def test_an_edit_that_raises_changes_nothing(config_store):
    def edit(state, _):
        raise LookupError("no such worker")

    with pytest.raises(LookupError):
        await config_store.change(edit)
    assert config_store.revision == 1
    assert (await config_store.reload("file")).outcome == "unchanged"  # the lock is free again


async def test_concurrent_changes_are_serialized(config_store, autojump_clock):
    outcomes = []

    async def add(name):
        changed = await config_store.change(
            lambda state, _: with_added(state, entry(name, origin="api")), '"1"'
        )
        outcomes.append(changed.outcome)

    async with trio.open_nursery() as nursery:
        for name in "bcd":
            nursery.start_soon(add, name)
    assert sorted(outcomes) == ["applied", "precondition_failed", "precondition_failed"]


def with_b(state, _):
    return with_added(state, entry("b", origin="api"))


async def test_a_change_is_saved_even_if_its_caller_disconnects(file, config_store):
    config_store.fleet.await_replicated = trio.sleep_forever
    with trio.CancelScope() as caller_scope:
        config_store.fleet.watch(caller_scope.cancel)
        await config_store.change(with_b)
    assert urls(config_store) == urls(store_of(file)) == [A, B]


async def test_a_state_that_could_not_be_written_is_written_at_the_next_reload(file, tmp_path):
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


def test_a_missing_file_at_the_start_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        store_of(tmp_path / "missing.toml")


async def test_changes_wait_in_order_for_the_operation_lock_unless_at_once(file, config_store):
    finished = []

    async def note(name, change):
        await change
        finished.append(name)

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
        assert finished == ["at once"]
        assert (urls(config_store), config_store.fleet.find(A).disabled) == ([A], True)
        config_store.operation_lock.release()
    assert finished == ["at once", "reload", "change"]
    assert urls(config_store) == [B]
    assert config_store.operation_lock.locked() is False


async def test_the_last_effective_reload_is_shown_after_an_unchanged_one(file, config_store):
    file.write_text("[health]\ninterval_secs = 7\n")
    assert (await config_store.reload("http")).outcome == "applied"
    last_reload = config_store.last_reload
    assert (await config_store.reload("file")).outcome == "unchanged"
    assert config_store.last_reload == last_reload
    file.write_text("[health]\ninterval_sec = 7\n")
    assert (await config_store.reload("file")).outcome == "refused"
    file.write_text("[health]\ninterval_secs = 7\n")
    await config_store.reload("file")
    assert config_store.last_reload["outcome"] == "unchanged"
    assert "error" not in config_store.last_reload


def reason():
    return "group 'g' at host:1, begun 3 s ago, step armed"


async def test_under_the_membership_lock_a_reload_applies_all_but_the_workers(file, config_store):
    config_store.membership_lock.acquire(reason)
    file.write_text(toml(A, B, more="[health]\ninterval_secs = 7\n"))
    result = await config_store.reload("file")
    assert (result.outcome, urls(config_store)) == ("applied", [A])
    assert config_store.config.health.interval_secs == 7
    assert reason() in config_store.last_reload["waits"]
    file.write_text(toml(B, more="[health]\ninterval_secs = 8\n"))
    await config_store.reload("file")
    assert (urls(config_store), config_store.config.health.interval_secs) == ([A], 8)
    await config_store.release_membership()
    assert urls(config_store) == [B]
    assert "waits" not in config_store.last_reload


async def test_a_reverted_change_of_workers_no_longer_waits(file, config_store):
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
