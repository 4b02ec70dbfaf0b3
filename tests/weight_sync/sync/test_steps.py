import pytest
import trio

from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import cordon_reasons_of
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    INIT,
    LOST,
    PREPARE,
    TENSORS,
    UPDATE,
    SyncEngines,
    sync_api,
    trainer_call,
    uncertain_workers,
    versions_by_url,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines


# Init


async def test_each_replica_gets_its_own_ranks_and_keeps_serving(trainer, engines):
    response = await trainer.init()
    assert response.ok
    assert engines.bodies(INIT, A)[0]["rank_offset"] == 1
    assert engines.bodies(INIT, B)[0]["rank_offset"] == 3
    assert {b["world_size"] for b in engines.bodies(INIT, A) + engines.bodies(INIT, B)} == {4}
    assert [rank_range["ranks"] for rank_range in response.body["layout"]] == [2, 1]
    assert cordon_reasons_of(trainer.api) == [[], []]
    assert trainer.api.config_store.membership_lock.held
    assert "group 'g' at 127.0.0.1" in trainer.api.config_store.membership_lock.reason()


async def test_ranks_are_counted_again_for_each_group(trainer, engines):
    await trainer.join()
    await trainer.expect_ok(DESTROY)
    engines.ranks[A] = 1  # A restarted with fewer ranks
    response = await trainer.init(world_size=3)
    assert [rank_range["rank_offset"] for rank_range in response.body["layout"]] == [1, 2]
    assert engines.bodies(INIT, B)[1]["rank_offset"] == 2


async def test_a_configured_backend_is_sent_to_every_replica(trainer_with, engines):
    trainer = await trainer_with(backend="nccl")
    await trainer.join()
    assert engines.bodies(INIT, B)[0]["backend"] == "nccl"


@pytest.mark.parametrize(("offset", "world"), [(4, 4), (2, 4), (0, 4), (1, 3)])
async def test_ranks_that_do_not_fit_are_refused_before_any_call(trainer, engines, offset, world):
    response = await trainer.init(rank_offset=offset, world_size=world)
    assert response.status == 400
    assert f"rank_offset {offset}" in response.body["message"]
    assert not engines.bodies(INIT, A) + engines.bodies(INIT, B)
    assert (trainer.state, trainer.api.config_store.membership_lock.held) == ("idle", False)


async def test_a_replica_that_does_not_report_its_ranks_is_named(trainer, engines):
    engines.set_reply(B, "/server_info", {}, 500)
    response = await trainer.init()
    assert response.status == 502
    assert B in response.body["message"]
    assert not engines.bodies(INIT, A)


async def test_a_partial_join_fails_at_once_and_is_undone(trainer, engines):
    engines.close_gate(INIT, A)  # A waits for B, as in a real rendezvous
    engines.set_reply(B, INIT, {"success": False, "message": "no room"}, 400)
    response = await trainer.init()
    assert response.status == 400
    assert response.body["message"] == f"{B}: status 400: no room"
    await trainer.until("idle")
    for url in (A, B):
        assert engines.bodies(DESTROY, url) == [{"group_name": "g"}]
    assert not trainer.api.config_store.membership_lock.held
    del engines.gates[A, INIT], engines.arrived[A, INIT], engines.replies[B, INIT]
    await trainer.join()


async def test_a_join_ends_at_init_timeout(trainer_with, engines):
    trainer = await trainer_with(init_timeout_secs=0.2)
    engines.close_gate(INIT, B)
    response = await trainer.init()
    assert response.status == 502
    assert f"no answer within 0.2 s: {B}" in response.body["message"]
    await trainer.until("idle")


async def test_a_trainer_address_without_a_torch_store_is_an_error(engines, folder, nursery):
    async def talk(stream):
        await stream.send_all(b"SSH-2.0-OpenSSH_9.6\r\n")
        await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, talk, [listener])
    api = sync_api(folder)
    await nursery.start(api.operations.run)
    engines.close_gate(INIT)
    port = listener.socket.getsockname()[1]
    with trio.fail_after(30):
        response = await api.operations.submit(
            trainer_call(
                INIT, master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=4
            )
        )
    assert not response.ok
    assert "speaks another protocol than a torch store" in response.body["message"]


# Two phases


@pytest.mark.parametrize("roles", [("regular", "regular"), ("prefill", "decode")])
async def test_a_sync_is_published_only_when_all_participants_have_it(trainer, engines, roles):
    for worker, role in zip(trainer.api.fleet.workers, roles, strict=True):
        trainer.api.fleet.report_role(worker, "" if role == "regular" else role)
    body = await trainer.arm()
    assert (body["status"], cordon_reasons_of(trainer.api)) == ("ready", [[], []])
    engines.close_gate(COMPLETE, B)
    forgotten = []
    trainer.api.fleet.watch_cache_cleared(lambda worker: forgotten.append(worker.url))
    async with trio.open_nursery() as nursery:
        responses = []

        async def complete():
            responses.append(await trainer.ask(COMPLETE, flush_cache=True, weight_version="v2"))

        nursery.start_soon(complete)
        await engines.arrived[B, COMPLETE].wait()
        assert cordon_reasons_of(trainer.api) == [["updating"], ["updating"]]
        assert set(versions_by_url(trainer.api).values()) == {(None, 0)}
        assert trainer.api.operations.sync.status()["members"][0]["standing"] == "updating"
        engines.open_gate(COMPLETE, B)
    (response,) = responses
    assert response.status == 200, response.body
    assert (response.body["num_buckets_received"], response.body["weight_version"]) == (1, "v2")
    assert response.body["verification"]["checked"] == [A, B]
    assert versions_by_url(trainer.api) == {A: ("v2", 1), B: ("v2", 1)}
    assert cordon_reasons_of(trainer.api) == [[], []]
    assert sorted(forgotten) == [A, B]
    await trainer.expect_ok(DESTROY)
    assert (trainer.state, trainer.api.config_store.membership_lock.held) == ("idle", False)


async def test_a_malformed_call_arms_no_participant_and_keeps_the_group(trainer, engines):
    await trainer.join()
    response = await trainer.ask(PREPARE, num_buckets=2, buckets=[TENSORS])
    assert (response.status, trainer.state) == (400, "grouped")
    assert not engines.bodies(PREPARE, A)
    await trainer.expect_ok(PREPARE, **BUCKETS)


async def test_a_prepare_that_a_participant_refuses_names_it_and_disarms_all_participants(
    trainer, engines
):
    await trainer.join()
    engines.set_reply(B, PREPARE, {"success": False, "message": "armed already"}, 409)
    response = await trainer.ask(PREPARE, **BUCKETS)
    assert response.body["message"] == f"{B}: status 409: armed already"
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A)
    assert not engines.bodies(COMPLETE, A)
    response = await trainer.ask(COMPLETE)
    assert response.status == 400
    assert B in response.body["message"]
    assert uncertain_workers(trainer.api) == []


@pytest.mark.parametrize(
    ("path", "after_prepare", "status"),
    [(COMPLETE, False, 400), (PREPARE, True, 409), (UPDATE, True, 409)],
)
async def test_calls_in_the_wrong_state_are_refused(trainer, path, after_prepare, status):
    await (trainer.arm() if after_prepare else trainer.join())
    before = trainer.state
    response = await trainer.ask(path, **TENSORS)
    assert (response.status, trainer.state) == (status, before)


@pytest.mark.parametrize("path", [PREPARE, COMPLETE, UPDATE, DESTROY])
async def test_without_a_group_every_call_is_refused(trainer, engines, path):
    response = await trainer.ask(path, **TENSORS)
    assert response.status == 400
    assert not engines.bodies(path, A)


async def test_a_call_for_another_group_name_is_refused(trainer):
    await trainer.join()
    response = await trainer.ask(PREPARE, **BUCKETS, group_name="other")
    assert response.status == 400
    assert "there is no group 'other'" in response.body["message"]


async def test_replicas_that_differ_are_uncertain_and_the_sync_fails(trainer, engines):
    engines.sums[B] = "other"
    await trainer.arm()
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert response.status == 502
    assert "checksums differ" in response.body["message"]
    assert uncertain_workers(trainer.api) == [A, B]
    assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]


async def test_a_lost_replica_is_uncertain_and_the_other_serves_the_new_version(trainer, engines):
    await trainer.arm()
    engines.replies[B, COMPLETE] = LOST
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert (response.status, response.body["weight_version"]) == (502, "v2")
    assert uncertain_workers(trainer.api) == [B]
    assert versions_by_url(trainer.api)[A] == ("v2", 1)
    await trainer.until("idle")
    assert cordon_reasons_of(trainer.api) == [[], ["uncertain"]]


async def test_weights_that_one_of_two_replicas_refused_are_not_published(trainer, engines):
    await trainer.arm()
    engines.set_reply(B, COMPLETE, {"success": False, "message": "the trainer sent fewer"}, 400)
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert response.status == 400
    assert uncertain_workers(trainer.api) == [A, B]
    assert trainer.api.operations.journal.published.epoch == 0


async def test_weights_that_all_refuse_leave_no_worker_uncertain(trainer, engines):
    before = versions_by_url(trainer.api)
    await trainer.arm()
    for url in (A, B):
        engines.set_reply(url, COMPLETE, {"success": False, "message": "the trainer is gone"}, 400)
    response = await trainer.ask(COMPLETE)
    assert (response.status, uncertain_workers(trainer.api)) == (400, [])
    await trainer.until("idle")
    assert (cordon_reasons_of(trainer.api), versions_by_url(trainer.api)) == ([[], []], before)


async def test_a_participant_without_a_readable_checksum_is_uncertain(trainer, engines):
    await trainer.arm()
    engines.replies[B, "/weights_checker"] = LOST
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert (response.status, uncertain_workers(trainer.api)) == (502, [B])
