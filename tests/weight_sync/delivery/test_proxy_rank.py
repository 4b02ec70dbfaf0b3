import importlib.util
import json
import os
import threading

import pytest
import trio
import trio.testing

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.process_group.rank_protocol import Groups
from omni_proxy.weight_sync.delivery import proxy_rank as proxy_rank_module
from omni_proxy.weight_sync.delivery.proxy_rank import ProxyRank
from omni_proxy.weight_sync.store.service import StoreService
from tests.ports import free_port
from tests.weight_sync.store.drafts import delete_store

pytest.importorskip("torch")

PATIENCE_SECS = 60
TENSORS = [["bfloat16", [300, 7], 1], ["float32", [5], 2], ["int64", [], 3], ["uint8", [0, 4], 4]]


@pytest.fixture
def settings():
    # In a thread: the tests of process_group cover the child process.
    return {"isolation": "thread", "init_timeout_secs": 20, "receive_timeout_secs": 20}


@pytest.fixture
def read_settings(tmp_path, settings):
    """As the configuration is read at each use: a test may change `settings`."""
    folder = str(tmp_path / "versions")
    return lambda: WeightSyncConfig(mode="receive", store_dir=folder, **settings)


@pytest.fixture
def store_service(tmp_path, read_settings):
    return StoreService(read_settings, tmp_path)


@pytest.fixture
async def rank(store_service, read_settings):
    made = ProxyRank(store_service, read_settings)
    with trio.fail_after(PATIENCE_SECS):
        yield made
        await made.close()
    if store_service.store is not None:
        delete_store(store_service.store)


def body(tensors=TENSORS, names=None, **more):
    names = names or [f"t{seed}" for _, _, seed in tensors]
    dtypes = [dtype for dtype, _, _ in tensors]
    shapes = [shape for _, shape, _ in tensors]
    fields = {"names": names, "dtypes": dtypes, "shapes": shapes}
    return json.dumps({"group_name": "g", **fields, **more}).encode()


def batched(*buckets):
    parts = [json.loads(body(bucket)) for bucket in buckets]
    fields = {"group_name": "g", "buckets": parts, "num_buckets": len(parts)}
    return json.dumps(fields).encode()


async def joined(rank, pool):
    trainer = pool.trainer()
    port = (await trio.to_thread.run_sync(lambda: trainer.tell("open", group="g")))["port"]
    asked = {"master_address": "127.0.0.1", "master_port": str(port), "group_name": "g"}
    answer = await rank.init({**asked, "backend": "gloo"}, 1, 2)
    assert answer.success, answer
    assert trainer.reply() == {"joined": True}
    return trainer


async def sent(trainer, tensors=TENSORS, **how):
    return await trio.to_thread.run_sync(
        lambda: trainer.tell("send", group="g", tensors=tensors, **how)
    )


async def left(rank, trainer):
    answer = await rank.destroy(b'{"group_name": "g"}')
    if trainer.living():
        trainer.tell("destroy", group="g")
    return answer


async def test_a_whole_sync_becomes_a_version_in_one_file(rank, store_service, pool):
    trainer = await joined(rank, pool)
    ready = await rank.prepare(batched(TENSORS[:2], TENSORS[2:]))
    assert (ready.success, ready.body["status"]) == (True, "ready")
    assert rank.status()["bytes_expected"] == 300 * 7 * 2 + 5 * 4 + 8
    await sent(trainer)
    done = await rank.complete(b'{"group_name": "g"}')
    assert (done.success, done.body["num_buckets_received"]) == (True, 2)
    version = await rank.seal("step-1")
    store = store_service.store
    assert list(version.manifest.files) == ["model.safetensors"]
    assert set(version.digests) == {"t1", "t2", "t3", "t4"}
    assert store.digest(version)
    assert (await left(rank, trainer)).success
    assert store.versions()[0].manifest.label == "step-1"


@pytest.mark.parametrize("how", [{}, {"flattened": True}])
async def test_parts_received_one_by_one_become_one_version(rank, store_service, pool, how):
    trainer = await joined(rank, pool)
    more = {"load_format": "flattened_bucket"} if how else {}
    for part in (TENSORS[:2], TENSORS[2:]):
        assert (await rank.prepare(body(part, **more))).success
        await sent(trainer, part, **how)
        assert (await rank.complete(b'{"group_name": "g"}')).success
    version = await rank.seal(None)
    assert len(version.manifest.files) == 2
    assert store_service.store.digest(version)
    await left(rank, trainer)


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
async def test_timeouts_of_zero_end_nothing(rank, pool):
    trainer = await joined(rank, pool)
    assert (await rank.prepare(body())).success
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sent, trainer)
        assert (await rank.complete(b'{"group_name": "g"}')).success
    await rank.seal("s")
    await left(rank, trainer)


async def test_the_first_byte_may_arrive_as_late_as_the_slowest_rank_is_armed(pool, tmp_path):
    values = {"isolation": "thread", "stall_timeout_secs": 0.2, "ready_timeout_secs": 20}

    def now():
        return WeightSyncConfig(mode="receive", store_dir=str(tmp_path / "versions"), **values)

    store_service = StoreService(now, tmp_path)
    rank = ProxyRank(store_service, now)
    with trio.fail_after(PATIENCE_SECS):
        trainer = await joined(rank, pool)
        one = TENSORS[:1]  # a single tensor: between several, a busy machine could stall
        assert (await rank.prepare(body(one))).success
        with trio.move_on_after(0.5):
            await trio.to_thread.run_sync(rank._pending.wait, 20, abandon_on_cancel=True)
        await sent(trainer, one)
        assert (await rank.complete(b'{"group_name": "g"}')).success
        await rank.discard()
        await left(rank, trainer)
        await rank.close()
    delete_store(store_service.store)


async def test_both_phases_may_be_one_call(rank, pool):
    trainer = await joined(rank, pool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sent, trainer)
        assert (await rank.update(body())).success
    assert len((await rank.seal("s")).digests) == 4
    await left(rank, trainer)


async def test_a_receive_that_is_not_completed_leaves_nothing_behind(
    rank, store_service, pool, tmp_path
):
    trainer = await joined(rank, pool)
    assert (await rank.prepare(body())).success
    folder = rank._draft.folder
    assert folder.is_dir()
    assert (await left(rank, trainer)).success
    assert not folder.exists()
    assert not store_service.store.in_use
    with pytest.raises(LookupError):
        await rank.seal("s")


async def test_a_trainer_that_dies_in_the_middle_leaves_no_version(rank, pool):
    trainer = await joined(rank, pool)
    assert (await rank.prepare(body())).success
    folder = rank._draft.folder
    await sent(trainer, stop_after=1)
    trainer.kill()
    done = await rank.complete(b'{"group_name": "g"}')
    assert (done.status, done.body["success"]) == (400, False)
    assert not folder.exists()
    await left(rank, trainer)


async def test_a_version_that_does_not_fit_is_refused_with_the_numbers(rank, pool):
    trainer = await joined(rank, pool)
    answer = await rank.prepare(body([["float32", [1 << 20, 1 << 24], 1]]))
    assert answer.status == 400
    assert f"needs {(1 << 46) + 512} bytes" in answer.body["message"]
    assert "free" in answer.body["message"]
    assert rank._draft is None
    assert (await rank.prepare(body())).success
    await left(rank, trainer)


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b'{"group_name": "g"}', "nothing is announced"),
        (body(names=["a", "a", "b", "c"]), "'a' is announced twice"),
    ],
)
async def test_a_malformed_call_is_refused_and_arms_nothing(rank, pool, request_body, message):
    trainer = await joined(rank, pool)
    answer = await rank.prepare(request_body)
    assert (answer.status, message in answer.body["message"]) == (400, True), answer
    assert rank.status() == {"armed": False}
    await left(rank, trainer)


async def test_calls_in_the_wrong_state_are_refused(rank):
    for call in (rank.prepare(body()), rank.complete(b"{}"), rank.update(body())):
        answer = await call
        assert (answer.status, answer.body["success"]) == (400, False)
    assert (await rank.destroy(b"{}")).success


async def test_two_tasks_that_open_the_receiver_share_it(rank, pool, monkeypatch):
    made, go_on, really = [], threading.Event(), proxy_rank_module.open_receiver

    def slowly(*arguments, **named):
        made.append(really(*arguments, **named))
        go_on.wait(PATIENCE_SECS)
        return made[-1]

    monkeypatch.setattr(proxy_rank_module, "open_receiver", slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank.warm_up)
        nursery.start_soon(rank.warm_up)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert len(made) == 1
    await left(rank, await joined(rank, pool))


async def test_the_child_process_ends_when_versions_are_off_and_the_group_is_gone(
    pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(proxy_rank_module, "UNUSED_POLL_SECS", 0.01)
    modes = ["receive"]

    def now():
        return WeightSyncConfig(mode=modes[-1], store_dir=str(tmp_path / "versions"))

    store_service = StoreService(now, tmp_path)
    rank = ProxyRank(store_service, now)
    with trio.fail_after(PATIENCE_SECS):
        trainer = await joined(rank, pool)
        receiver = rank._receiver
        assert receiver.busy()
        modes.append("coordinate")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank.close_when_unused)
            await rank.prepare(body())
            await sent(trainer)
            assert (await rank.complete(b'{"group_name": "g"}')).success
            modes.append("both")  # enabled again before the child could end
        assert rank._receiver is receiver
        modes.append("off")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank.close_when_unused)
            assert (await left(rank, trainer)).success
        assert rank._receiver is None
        with pytest.raises(proxy_rank_module.GroupError, match="shutting down"):
            receiver.sender(proxy_rank_module.HostedRendezvous("127.0.0.1", 2, "h", "gloo", 1.0))
        await rank.warm_up()  # the mode is off by now
        assert rank._receiver is None
        modes.append("receive")
        await left(rank, await joined(rank, pool))
        await rank.close()
    delete_store(store_service.store)


@pytest.mark.parametrize("settings", [{"isolation": "thread", "init_timeout_secs": 120}])
async def test_a_join_that_is_destroyed_at_once_joins_nothing(rank, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def dawdle(*_):
        begun.set()
        go_on.wait(PATIENCE_SECS)

    monkeypatch.setattr(Groups, "_replace_dead_group", dawdle)
    place = {"master_address": "127.0.0.1", "master_port": free_port(), "group_name": "g"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank.init, place, 1, 2)
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
    await rank.destroy(b'{"group_name": "g"}')
    go_on.set()
    while any(each.name == "weights-rank-init" for each in threading.enumerate()):  # noqa: ASYNC110
        await trio.sleep(0.01)
    assert rank._receiver.status()["groups"] == []


async def test_a_destroy_does_not_wait_for_calls_of_its_group(rank, pool):
    trainer = await joined(rank, pool)
    calls = rank._threads._call_limiter
    while calls.available_tokens:
        calls.acquire_on_behalf_of_nowait(object())
    assert (await left(rank, trainer)).success
    assert rank._receiver.status()["groups"] == []


async def test_without_torch_the_error_names_what_to_install(rank, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else found(name)
    )
    await rank.warm_up()
    answer = await rank.init({"master_address": "127.0.0.1", "master_port": 1}, 1, 2)
    assert answer.status == 400
    assert "pip install 'omni-proxy[weights]'" in answer.body["message"]


async def test_a_folder_that_is_in_use_is_named(rank, tmp_path):
    from omni_proxy.weight_sync.store.version_store import VersionStore

    os.makedirs(tmp_path / "versions")
    other = VersionStore(tmp_path / "versions")
    answer = await rank.init({"master_address": "127.0.0.1", "master_port": 1}, 1, 2)
    assert (answer.status, "in use by another" in answer.body["message"]) == (400, True)
    other.close()
