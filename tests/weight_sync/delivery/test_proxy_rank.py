import importlib.util
import json
import os
import threading

import pytest
import trio
import trio.testing

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.process_group.group import Groups
from omni_proxy.weight_sync.delivery import proxy_rank
from omni_proxy.weight_sync.delivery.proxy_rank import ProxyRank
from omni_proxy.weight_sync.store.service import StoreService
from tests.ports import free_port
from tests.weight_sync.store.drafts import forget

pytest.importorskip("torch")

PATIENCE_SECS = 60
TENSORS = [["bfloat16", [300, 7], 1], ["float32", [5], 2], ["int64", [], 3], ["uint8", [0, 4], 4]]


@pytest.fixture
def settings():
    # In a thread of ours: what a child adds is its own room's to prove.
    return {"isolation": "thread", "init_timeout_secs": 20, "receive_timeout_secs": 20}


@pytest.fixture
async def own(tmp_path, settings):
    def now():
        return WeightSyncConfig(mode="receive", store_dir=str(tmp_path / "versions"), **settings)

    made = ProxyRank(StoreService(now, tmp_path), now)
    with trio.fail_after(PATIENCE_SECS):
        yield made
        await made.close()
    if made._shelf.store is not None:
        forget(made._shelf.store)


def body(tensors=TENSORS, names=None, **more):
    names = names or [f"t{seed}" for _, _, seed in tensors]
    dtypes = [dtype for dtype, _, _ in tensors]
    shapes = [shape for _, shape, _ in tensors]
    told = {"names": names, "dtypes": dtypes, "shapes": shapes}
    return json.dumps({"group_name": "g", **told, **more}).encode()


def batched(*buckets):
    parts = [json.loads(body(bucket)) for bucket in buckets]
    told = {"group_name": "g", "buckets": parts, "num_buckets": len(parts)}
    return json.dumps(told).encode()


async def joined(own, pool):
    trainer = pool.trainer()
    port = (await trio.to_thread.run_sync(lambda: trainer.tell("open", group="g")))["port"]
    asked = {"master_address": "127.0.0.1", "master_port": str(port), "group_name": "g"}
    answer = await own.init({**asked, "backend": "gloo"}, 1, 2)
    assert answer.success, answer
    assert trainer.reply() == {"joined": True}
    return trainer


async def sent(trainer, tensors=TENSORS, **how):
    return await trio.to_thread.run_sync(
        lambda: trainer.tell("send", group="g", tensors=tensors, **how)
    )


async def left(own, trainer):
    answer = await own.destroy(b'{"group_name": "g"}')
    if trainer.living():
        trainer.tell("destroy", group="g")
    return answer


async def test_a_whole_sync_becomes_a_version_in_one_file(own, pool):
    trainer = await joined(own, pool)
    ready = await own.prepare(batched(TENSORS[:2], TENSORS[2:]))
    assert (ready.success, ready.body["status"]) == (True, "ready")
    assert own.status()["bytes_expected"] == 300 * 7 * 2 + 5 * 4 + 8
    await sent(trainer)
    done = await own.complete(b'{"group_name": "g"}')
    assert (done.success, done.body["num_buckets_received"]) == (True, 2)
    version = await own.seal("step-1")
    store = own._shelf.store
    assert list(version.record.files) == ["model.safetensors"]
    assert set(version.digests) == {"t1", "t2", "t3", "t4"}
    assert store.digest(version)
    assert (await left(own, trainer)).success
    assert store.versions()[0].record.label == "step-1"


@pytest.mark.parametrize("how", [{}, {"flattened": True}])
async def test_parts_that_come_one_by_one_are_one_version(own, pool, how):
    trainer = await joined(own, pool)
    more = {"load_format": "flattened_bucket"} if how else {}
    for part in (TENSORS[:2], TENSORS[2:]):
        assert (await own.prepare(body(part, **more))).success
        await sent(trainer, part, **how)
        assert (await own.complete(b'{"group_name": "g"}')).success
    version = await own.seal(None)
    assert len(version.record.files) == 2
    assert own._shelf.store.digest(version)
    await left(own, trainer)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "isolation": "thread",
            "init_timeout_secs": 0,
            "ready_timeout_secs": 0,
            "receive_timeout_secs": 0,
            "stall_timeout_secs": 0,
        }
    ],
)
async def test_clocks_that_are_off_end_nothing(own, pool):
    trainer = await joined(own, pool)
    assert (await own.prepare(body())).success
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sent, trainer)
        assert (await own.complete(b'{"group_name": "g"}')).success
    await own.seal("s")
    await left(own, trainer)


async def test_its_first_byte_may_come_as_late_as_the_slowest_rank_is_armed(pool, tmp_path):
    told = {"isolation": "thread", "stall_timeout_secs": 0.2, "ready_timeout_secs": 20}

    def now():
        return WeightSyncConfig(mode="receive", store_dir=str(tmp_path / "versions"), **told)

    own = ProxyRank(StoreService(now, tmp_path), now)
    with trio.fail_after(PATIENCE_SECS):
        trainer = await joined(own, pool)
        one = TENSORS[:1]  # between two of them a stall is one, on a machine with a lot to do too
        assert (await own.prepare(body(one))).success
        with trio.move_on_after(0.5):
            await trio.to_thread.run_sync(own._armed.wait, 20, abandon_on_cancel=True)
        await sent(trainer, one)
        assert (await own.complete(b'{"group_name": "g"}')).success
        await own.discard()
        await left(own, trainer)
        await own.close()
    forget(own._shelf.store)


async def test_both_phases_may_be_one_call(own, pool):
    trainer = await joined(own, pool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sent, trainer)
        assert (await own.update(body())).success
    assert len((await own.seal("s")).digests) == 4
    await left(own, trainer)


async def test_what_is_not_completed_leaves_nothing_behind(own, pool, tmp_path):
    trainer = await joined(own, pool)
    assert (await own.prepare(body())).success
    folder = own._draft.folder
    assert folder.is_dir()
    assert (await left(own, trainer)).success
    assert not folder.exists()
    assert not own._shelf.store.in_use
    with pytest.raises(LookupError):
        await own.seal("s")


async def test_a_trainer_that_dies_in_the_middle_leaves_no_version(own, pool):
    trainer = await joined(own, pool)
    assert (await own.prepare(body())).success
    folder = own._draft.folder
    await sent(trainer, stop_after=1)
    trainer.kill()
    done = await own.complete(b'{"group_name": "g"}')
    assert (done.status, done.body["success"]) == (400, False)
    assert not folder.exists()
    await left(own, trainer)


async def test_a_version_that_fits_nowhere_is_refused_with_the_numbers(own, pool):
    trainer = await joined(own, pool)
    answer = await own.prepare(body([["float32", [1 << 20, 1 << 24], 1]]))
    assert answer.status == 400
    assert f"needs {(1 << 46) + 512} bytes" in answer.body["message"]
    assert "free" in answer.body["message"]
    assert own._draft is None
    assert (await own.prepare(body())).success
    await left(own, trainer)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (b"{", "the body is no JSON"),
        (b'{"group_name": "g"}', "nothing is announced"),
        (body(names=["a", "a", "b", "c"]), "'a' is announced twice"),
    ],
)
async def test_what_is_malformed_is_refused_and_nothing_is_armed(own, pool, asked, told):
    trainer = await joined(own, pool)
    answer = await own.prepare(asked)
    assert (answer.status, told in answer.body["message"]) == (400, True), answer
    assert own.status() == {"armed": False}
    await left(own, trainer)


async def test_calls_out_of_place_are_refused(own):
    for call in (own.prepare(body()), own.complete(b"{}"), own.update(body())):
        answer = await call
        assert (answer.status, answer.body["success"]) == (400, False)
    assert (await own.destroy(b"{}")).success


async def test_two_that_want_its_receiver_at_once_have_the_same(own, pool, monkeypatch):
    made, go_on, really = [], threading.Event(), proxy_rank.open_receiver

    def slowly(*arguments, **named):
        made.append(really(*arguments, **named))
        go_on.wait(PATIENCE_SECS)
        return made[-1]

    monkeypatch.setattr(proxy_rank, "open_receiver", slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(own.warm)
        nursery.start_soon(own.warm)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert len(made) == 1
    await left(own, await joined(own, pool))


async def test_its_child_ends_when_versions_are_not_wanted_any_more_and_its_group_is_over(
    pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(proxy_rank, "REST_SECS", 0.01)
    modes = ["receive"]

    def now():
        return WeightSyncConfig(mode=modes[-1], store_dir=str(tmp_path / "versions"))

    own = ProxyRank(StoreService(now, tmp_path), now)
    with trio.fail_after(PATIENCE_SECS):
        trainer = await joined(own, pool)
        receiver = own._receiver
        assert receiver.busy()
        modes.append("coordinate")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.rest)
            await own.prepare(body())
            await sent(trainer)
            assert (await own.complete(b'{"group_name": "g"}')).success
            modes.append("both")  # wanted again before it could end
        assert own._receiver is receiver
        modes.append("off")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.rest)
            assert (await left(own, trainer)).success
        assert own._receiver is None
        with pytest.raises(proxy_rank.GroupError, match="shutting down"):
            receiver.sender(proxy_rank.HostedRendezvous("127.0.0.1", 2, "h", "gloo", 1.0))
        await own.warm()  # somebody was quicker than that
        assert own._receiver is None
        modes.append("receive")
        await left(own, await joined(own, pool))
        await own.close()
    forget(own._shelf.store)


@pytest.mark.parametrize("settings", [{"isolation": "thread", "init_timeout_secs": 120}])
async def test_a_join_that_has_hardly_begun_when_its_group_is_destroyed_joins_nothing(
    own, monkeypatch
):
    begun, go_on = threading.Event(), threading.Event()

    def dawdle(*_):
        begun.set()
        go_on.wait(PATIENCE_SECS)

    monkeypatch.setattr(Groups, "_replace_dead_group", dawdle)
    place = {"master_address": "127.0.0.1", "master_port": free_port(), "group_name": "g"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(own.init, place, 1, 2)
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
    await own.destroy(b'{"group_name": "g"}')
    go_on.set()
    while any(each.name == "weights-own-init" for each in threading.enumerate()):  # noqa: ASYNC110
        await trio.sleep(0.01)
    assert own._receiver.status()["groups"] == []


async def test_what_ends_a_group_does_not_wait_behind_who_waits_for_it(own, pool):
    trainer = await joined(own, pool)
    calls = own._threads._most
    while calls.available_tokens:
        calls.acquire_on_behalf_of_nowait(object())
    assert (await left(own, trainer)).success
    assert own._receiver.status()["groups"] == []


async def test_without_torch_a_trainer_is_told_what_to_install(own, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else found(name)
    )
    await own.warm()
    answer = await own.init({"master_address": "127.0.0.1", "master_port": 1}, 1, 2)
    assert answer.status == 400
    assert "pip install 'omni-proxy[weights]'" in answer.body["message"]


async def test_a_folder_that_is_in_use_is_named(own, tmp_path):
    from omni_proxy.weight_sync.store.version_store import VersionStore

    os.makedirs(tmp_path / "versions")
    other = VersionStore(tmp_path / "versions")
    answer = await own.init({"master_address": "127.0.0.1", "master_port": 1}, 1, 2)
    assert (answer.status, "in use by another" in answer.body["message"]) == (400, True)
    other.close()
