"""A weight update in vLLM's dialect over two engines, without sockets."""

import pytest
import trio

from omni_proxy.fleet.cordon_reasons import UPDATING
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import cordon_reasons_of, read_journal
from tests.weight_sync.trainer_fixture import (
    open_trainer_store,
    sync_api,
    uncertain_workers,
    versions_by_url,
)
from tests.weight_sync.vllm_fixture import (
    DRAFT,
    FINISH,
    INIT,
    LOST,
    PAUSE,
    RESUME,
    SHUTDOWN,
    START,
    TENSORS,
    UPDATE,
    VllmEngines,
    VllmTrainer,
    init_info,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = VllmEngines
CHUNK = {"update_info": TENSORS}


@pytest.fixture
def trainer_with(engines, folder, nursery, store, listening):
    async def begin(**settings):
        api = sync_api(folder, **settings)
        await nursery.start(api.operations.run)
        return VllmTrainer(api, store)

    return begin


# A whole round


async def test_every_engine_gets_its_ranks_and_the_trainer_one_response(trainer, engines):
    response = await trainer.init(packed=True)
    assert (response.status, response.body["message"]) == (200, "Weight transfer initialized")
    init_infos = [engines.bodies(INIT, url)[0]["init_info"] for url in (A, B)]
    assert [(info["rank_offset"], info["world_size"]) for info in init_infos] == [(1, 4), (3, 4)]
    assert all(info["packed"] is True for info in init_infos)
    assert response.body["layout"] == [
        {"member": A, "rank_offset": 1, "ranks": 2},
        {"member": B, "rank_offset": 3, "ranks": 1},
    ]


async def test_weights_are_published_only_by_finish(trainer, engines):
    await trainer.start()
    assert cordon_reasons_of(trainer.api) == [["updating"], ["updating"]]
    await trainer.expect_ok(UPDATE, CHUNK)
    await trainer.expect_ok(UPDATE, CHUNK)
    assert cordon_reasons_of(trainer.api) == [["updating"], ["updating"]]
    assert versions_by_url(trainer.api) == {A: (None, 0), B: (None, 0)}
    completed = await trainer.expect_ok(FINISH, {"weight_version": "v2"})
    assert (completed["message"], completed["weight_epoch"]) == ("Weight update finished", 1)
    assert completed["weight_versions"] == {A: "v2", B: "v2"}
    assert versions_by_url(trainer.api) == {A: ("v2", 1), B: ("v2", 1)}
    assert cordon_reasons_of(trainer.api) == [[], []]


async def test_a_group_can_have_several_rounds(trainer, engines):
    await trainer.join()
    for number in range(3):
        assert (await trainer.round(f"v{number}"))["weight_epoch"] == number + 1
    assert len(engines.bodies(INIT)) == 1


async def test_a_list_of_updates_is_divided_by_ranks(trainer, engines):
    await trainer.start()
    await trainer.expect_ok(UPDATE, {"update_info": [{"names": [n]} for n in "abc"]})
    assert engines.bodies(UPDATE, A) == [{"update_info": [{"names": ["a"]}, {"names": ["b"]}]}]
    assert engines.bodies(UPDATE, B) == [{"update_info": [{"names": ["c"]}]}]


async def test_a_backend_without_ranks_and_without_a_store_can_sync(trainer, engines):
    assert (await trainer.ask(INIT, {"init_info": {}})).ok
    assert engines.bodies(INIT, A) == [{"init_info": {}}]
    assert not trainer.api.config_store.membership_lock.held
    assert (await trainer.round())["weight_epoch"] == 1


async def test_a_finish_without_a_label_keeps_that_of_the_engines(trainer):
    await trainer.start()
    assert (await trainer.expect_ok(FINISH))["weight_versions"] == {A: "default", B: "default"}
    assert versions_by_url(trainer.api) == {A: ("default", 1), B: ("default", 1)}


async def test_a_repeated_finish_gets_the_response_of_the_first(trainer, engines):
    await trainer.start()
    first = await trainer.expect_ok(FINISH, {"weight_version": "v2"})
    assert await trainer.expect_ok(FINISH, {"weight_version": "v2"}) == first
    assert len(engines.bodies(FINISH)) == 1


async def test_a_trainer_that_leaves_ends_the_group(trainer, engines):
    await trainer.join()
    assert (await trainer.expect_ok(SHUTDOWN))["status"] == "ok"
    assert trainer.state == "idle"
    assert (await trainer.ask(START)).status == 400


# Pauses


async def test_an_engine_that_is_not_paused_is_paused_for_the_update(trainer, engines):
    await trainer.start()
    assert engines.targets(PAUSE) == ["/pause?mode=keep"]
    assert engines.paused == {A, B}
    assert read_journal(trainer.api.operations.journal._file.folder).pauses[A].by == "the proxy"
    await trainer.expect_ok(FINISH, {"weight_version": "v2"})
    assert engines.targets("/reset_prefix_cache") == [
        "/reset_prefix_cache?reset_running_requests=true"
    ]
    assert engines.paused == set()
    assert not trainer.api.operations.journal.all_paused


async def test_an_engine_that_its_trainer_paused_stays_paused(trainer, engines):
    await trainer.expect_ok(PAUSE, query="mode=keep")
    await trainer.join()
    await trainer.round()
    assert engines.paused == {A, B}
    assert engines.targets(PAUSE) == ["/pause?mode=keep"]
    assert engines.targets("/reset_prefix_cache") == []
    assert (await trainer.expect_ok(RESUME))["status"] == "resumed"
    assert engines.paused == set()


async def test_a_resume_before_the_finish_ends_the_update_before_it_resumes(trainer, engines):
    await trainer.expect_ok(PAUSE, query="mode=keep")
    await trainer.start()
    await trainer.expect_ok(UPDATE, CHUNK)
    body = await trainer.expect_ok(RESUME)
    assert set(body["uncertain"]) == {A, B}
    paths = engines.paths(A)
    assert paths.index(FINISH) < paths.index("/abort_requests") < paths.index(RESUME)
    assert uncertain_workers(trainer.api) == [A, B]
    assert (
        "resumed before the update was finished"
        in (await trainer.ask(UPDATE, CHUNK)).body["message"]
    )


# Failures


async def test_a_chunk_that_one_engine_refuses_makes_all_workers_uncertain(trainer, engines):
    await trainer.start()
    engines.set_rpc_error(B, UPDATE, "tensor b has no such shape")
    response = await trainer.ask(UPDATE, CHUNK)
    assert (response.status, "no such shape" in response.body["message"]) == (502, True)
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]
    assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]
    # Otherwise the next update would count as the rest of this one.
    assert [path for path in engines.paths(B) if path in (START, FINISH, SHUTDOWN)][-3:] == [
        START, FINISH, SHUTDOWN
    ]  # fmt: skip
    assert engines.open == engines.collected == set()


async def test_the_next_successful_round_returns_all_workers_to_rotation(trainer, engines):
    await trainer.start()
    engines.replies[B, UPDATE] = LOST
    assert not (await trainer.ask(UPDATE, CHUNK)).ok
    await trainer.until("idle")
    del engines.replies[B, UPDATE]
    await trainer.join()
    assert (await trainer.round("v3"))["weight_epoch"] == 1
    assert uncertain_workers(trainer.api) == []
    assert versions_by_url(trainer.api) == {A: ("v3", 1), B: ("v3", 1)}
    assert engines.paused == set()


async def test_a_draft_update_returns_no_worker_to_rotation(trainer, engines):
    trainer.api.operations.journal.mark_uncertain({A: "it was damaged"})
    await trainer.join()
    await trainer.expect_ok(DRAFT)
    await trainer.expect_ok(UPDATE, CHUNK)
    engines.sums[A] = "other"
    await trainer.expect_ok(FINISH)
    assert uncertain_workers(trainer.api) == [A]


async def test_a_start_that_all_engines_refuse_makes_no_worker_uncertain(trainer, engines):
    await trainer.join()
    for url in (A, B):
        engines.set_rpc_error(url, START, "Weight transfer not configured.")
    response = await trainer.ask(START)
    assert (response.status, "not configured" in response.body["message"]) == (502, True)
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == []
    assert cordon_reasons_of(trainer.api) == [[], []]
    assert engines.paused == set()


async def test_a_start_that_succeeds_on_one_engine_makes_both_uncertain(trainer, engines):
    await trainer.join()
    engines.set_rpc_error(B, START, "out of memory")
    assert (await trainer.ask(START)).status == 502
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]


async def test_a_start_refused_because_of_an_open_update_makes_workers_uncertain(trainer, engines):
    await trainer.join()
    engines.open |= {A, B}
    assert not (await trainer.ask(START)).ok
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]
    assert engines.open == engines.collected == set()


async def test_a_finish_that_is_lost_by_one_engine_publishes_for_the_other(trainer, engines):
    await trainer.start()
    engines.replies[B, FINISH] = LOST
    response = await trainer.ask(FINISH, {"weight_version": "v2"})
    assert (response.status, response.body["weight_epoch"]) == (502, 1)
    await trainer.until("idle")
    assert versions_by_url(trainer.api)[A] == ("v2", 1)
    assert uncertain_workers(trainer.api) == [B]


async def test_weights_of_engines_with_different_checksums_are_not_published(trainer, engines):
    engines.ranks = {A: 1, B: 1}
    engines.sums[B] = "other"
    await trainer.start()
    response = await trainer.ask(FINISH, {"weight_version": "v2"})
    assert response.status == 502
    assert uncertain_workers(trainer.api) == [A, B]


async def test_a_dead_trainer_ends_an_open_update(trainer, engines):
    await trainer.start()
    await trainer.expect_ok(UPDATE, CHUNK)
    trainer.store.die()
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]
    assert engines.open == engines.collected == set()


async def test_a_participant_that_dies_during_an_update_ends_the_round(trainer, engines, listening):
    await trainer.start()
    engines.close_gate(UPDATE, A)
    responses = []
    async with trio.open_nursery() as nursery:

        async def send_chunk():
            responses.append(await trainer.ask(UPDATE, CHUNK))

        nursery.start_soon(send_chunk)
        await engines.arrived[A, UPDATE].wait()
        listening[A].set()
        with trio.fail_after(30):
            while not responses:  # noqa: ASYNC110
                await trio.sleep(0.01)
        engines.open_gate(UPDATE, A)
    assert A in responses[0].body["message"]
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]


# Calls in the wrong state, or of another trainer


async def test_calls_without_an_init_name_the_missing_step(trainer, engines):
    for path, body in ((START, None), (UPDATE, CHUNK), (FINISH, None), (SHUTDOWN, None)):
        response = await trainer.ask(path, body)
        assert (response.status, INIT in response.body["message"]) == (400, True), path
    assert engines.requests == []


async def test_calls_without_a_start_name_the_missing_step(trainer, engines):
    await trainer.join()
    for path, body in ((UPDATE, CHUNK), (FINISH, None)):
        response = await trainer.ask(path, body)
        assert (response.status, START in response.body["message"]) == (400, True), path
    assert engines.bodies(UPDATE) == engines.bodies(FINISH) == []


async def test_a_second_start_is_refused_while_an_update_is_open(trainer, engines):
    await trainer.start()
    response = await trainer.ask(START)
    assert (response.status, "open already" in response.body["message"]) == (409, True)
    assert len(engines.bodies(START)) == 1
    await trainer.expect_ok(FINISH, {"weight_version": "v2"})


async def test_an_init_is_refused_during_the_update_of_another_trainer(trainer):
    await trainer.start()
    async with open_trainer_store() as other:
        response = await trainer.ask(INIT, {"init_info": init_info(other)})
        assert response.status == 409
        forced = await trainer.ask(INIT, {"init_info": init_info(other), "force": True})
        assert forced.ok, forced.body
    assert uncertain_workers(trainer.api) == [A, B]


async def test_an_init_without_an_open_update_replaces_the_group(trainer, engines):
    await trainer.join()
    async with open_trainer_store() as other:
        assert (await trainer.ask(INIT, {"init_info": init_info(other)})).ok
        assert engines.paths(A).count(SHUTDOWN) == 1
        assert trainer.api.operations.sync.status()["owner"]["master"] == f"127.0.0.1:{other.port}"
    assert trainer.api.operations.sync.lifecycle.meters.aborts == {}


async def test_a_shutdown_is_refused_while_an_update_is_open(trainer):
    await trainer.start()
    response = await trainer.ask(SHUTDOWN)
    assert (response.status, "finish it first" in response.body["message"]) == (409, True)


async def test_an_sglang_engine_cannot_be_a_rank(trainer, engines):
    engines.kinds[B] = "sglang"
    response = await trainer.init()
    assert (response.status, B in response.body["message"]) == (422, True)
    assert engines.bodies(INIT, A) == []


async def test_engines_that_were_not_chosen_have_not_missed_an_update(trainer, engines, folder):
    engines.kinds[B] = "sglang"
    chosen = frozenset((A,))
    assert (await trainer.ask(INIT, {"init_info": init_info(trainer.store)}, chosen=chosen)).ok
    await trainer.round()
    published = trainer.api.operations.journal.published
    assert (published.target_for(A, None).label, published.target_for(B, None)) == ("v2", None)


async def test_ranks_that_do_not_fit_are_refused_before_anything_is_sent(trainer, engines):
    response = await trainer.init(world_size=3)
    assert (response.status, "world_size is 3" in response.body["message"]) == (400, True)
    assert engines.bodies(INIT) == []


async def test_an_invalid_body_does_not_end_the_update(trainer, engines):
    await trainer.start()
    assert (await trainer.ask(UPDATE, {})).status == 400
    assert (await trainer.ask(UPDATE, {"update_info": [TENSORS]})).status == 400
    assert (await trainer.ask(FINISH, {"weight_version": 7})).status == 400
    assert engines.bodies(UPDATE) == engines.bodies(FINISH) == []
    await trainer.expect_ok(UPDATE, CHUNK)
    await trainer.expect_ok(FINISH, {"weight_version": "v2"})


# Verification while the engines are paused


async def test_a_checker_that_needs_running_engines_is_called_after_the_resume(trainer, engines):
    engines.checker_needs_running, engines.ranks = True, {A: 1, B: 1}
    await trainer.expect_ok(PAUSE, query="mode=keep")
    await trainer.join()
    completed = await trainer.round()
    assert set(completed["verification"]["unverified"]) == {A, B}
    assert versions_by_url(trainer.api) == {A: ("v2", 1), B: ("v2", 1)}
    body = await trainer.expect_ok(RESUME)
    assert set(body["verification"]["checked"]) == {A, B}
    assert trainer.api.operations.journal.published.target_for(A, None).digest
    assert uncertain_workers(trainer.api) == []


async def test_workers_that_differ_after_the_resume_are_uncertain(trainer, engines):
    engines.checker_needs_running, engines.ranks = True, {A: 1, B: 1}
    await trainer.expect_ok(PAUSE, query="mode=keep")
    await trainer.join()
    await trainer.round()
    engines.sums[B] = "other"
    await trainer.expect_ok(RESUME)
    assert uncertain_workers(trainer.api) == [A, B]


# Crashes of the proxy


async def test_an_open_update_is_in_the_journal_between_its_calls(trainer, folder):
    await trainer.start()
    entry = read_journal(folder).sync
    assert (entry.step, entry.targets) == ("open", (A, B))
    assert set(read_journal(folder).uncertain_at_start()) == {A, B}
    await trainer.expect_ok(FINISH, {"weight_version": "v2"})
    assert read_journal(folder).uncertain_at_start() == {}


async def test_after_a_crash_engines_leave_the_group_and_resume(trainer, engines, folder, nursery):
    await trainer.start()
    before = read_journal(folder)
    restarted = sync_api(folder / "again")
    restarted.operations.journal._file.write(before)
    restarted = sync_api(folder / "again")
    assert [sorted(w.cordon_reasons) for w in restarted.fleet.workers] == [["uncertain"]] * 2
    await nursery.start(restarted.operations.run)
    await restarted.operations.sync.lifecycle.wait_settled()
    assert engines.open == engines.paused == set()
    assert uncertain_workers(restarted) == [A, B]
    assert UPDATING not in restarted.fleet.workers[0].cordon_reasons
