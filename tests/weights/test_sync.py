import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.control.journal import decode
from omni_proxy.fleet.health import Health
from omni_proxy.weights import sync_life
from tests.front.house import NOW, A, B
from tests.weights.desks import held
from tests.weights.syncs import (
    BUCKETS,
    COMPLETE,
    CONTINUE,
    DESTROY,
    END,
    INIT,
    LOST,
    PREPARE,
    TENSORS,
    UPDATE,
    Engines,
    Trainer,
    asks,
    init_body,
    store_of_a_trainer,
    sync_house,
)

DISK = "/update_weights_from_disk"


pytestmark = pytest.mark.usefixtures("listening")


@pytest.fixture
def engines(monkeypatch):
    return Engines().install(monkeypatch)


def versions(house):
    return {w.url: (w.weight_version, w.weight_epoch) for w in house.fleet.workers}


def uncertain(house):
    return sorted(house.desk.book.reasons)


# Joining


async def test_each_replica_gets_ranks_of_its_own_and_nobody_stops_serving(trainer, engines):
    answer = await trainer.init()
    assert answer.ok
    assert engines.bodies(INIT, A)[0]["rank_offset"] == 1
    assert engines.bodies(INIT, B)[0]["rank_offset"] == 3
    assert {b["world_size"] for b in engines.bodies(INIT, A) + engines.bodies(INIT, B)} == {4}
    assert [seat["ranks"] for seat in answer.body["layout"]] == [2, 1]
    assert held(trainer.house) == [[], []]
    assert trainer.house.keeper.freeze.on
    assert "group 'g' at 127.0.0.1" in trainer.house.keeper.freeze.why()


async def test_a_backend_of_ours_goes_to_every_replica(engines, folder, nursery, store):
    house = sync_house(folder, backend="nccl")
    await nursery.start(house.desk.run)
    await Trainer(house, store).join()
    assert engines.bodies(INIT, B)[0]["backend"] == "nccl"


@pytest.mark.parametrize(("offset", "world"), [(4, 4), (2, 4), (0, 4), (1, 3)])
async def test_ranks_that_do_not_fit_are_refused_and_nobody_is_asked(
    trainer, engines, offset, world
):
    answer = await trainer.init(rank_offset=offset, world_size=world)
    assert answer.status == 400
    assert f"rank_offset {offset}" in answer.body["message"]
    assert not engines.bodies(INIT, A) + engines.bodies(INIT, B)
    assert (trainer.state, trainer.house.keeper.freeze.on) == ("idle", False)


async def test_a_replica_that_does_not_tell_its_ranks_is_named(trainer, engines):
    engines.tell(B, "/server_info", {}, 500)
    answer = await trainer.init()
    assert answer.status == 502
    assert B in answer.body["message"]
    assert not engines.bodies(INIT, A)


async def test_a_partial_join_is_answered_at_once_and_undone(trainer, engines):
    engines.shut(INIT, A)  # it waits for the other, as in a real rendezvous
    engines.tell(B, INIT, {"success": False, "message": "no room"}, 400)
    answer = await trainer.init()
    assert answer.status == 400
    assert answer.body["message"] == f"{B}: status 400: no room"
    await trainer.until("idle")
    for url in (A, B):
        assert engines.bodies(DESTROY, url) == [{"group_name": "g"}]
    assert not trainer.house.keeper.freeze.on
    del engines.gates[A, INIT], engines.came[A, INIT], engines.says[B, INIT]
    await trainer.join()


async def test_a_join_ends_at_its_own_deadline_and_at_no_other(engines, folder, nursery, store):
    house = sync_house(folder, init_timeout_secs=0.2)
    await nursery.start(house.desk.run)
    trainer = Trainer(house, store)
    engines.shut(INIT, B)
    answer = await trainer.init()
    assert answer.status == 502
    assert f"no answer within 0.2 s: {B}" in answer.body["message"]
    await trainer.until("idle")


async def test_something_that_is_no_store_is_found_out(engines, folder, nursery):
    async def talk(stream):
        await stream.send_all(b"SSH-2.0-OpenSSH_9.6\r\n")
        await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, talk, [listener])
    house = sync_house(folder)
    await nursery.start(house.desk.run)
    engines.shut(INIT)
    port = listener.socket.getsockname()[1]
    with trio.fail_after(10):
        answer = await house.desk.submit(
            asks(INIT, master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=4)
        )
    assert not answer.ok
    assert "speaks another protocol than a torch store" in answer.body["message"]


# Two phases


async def test_a_whole_sync_is_published_when_all_have_it_and_not_before(trainer, engines):
    told = await trainer.arm()
    assert (told["status"], held(trainer.house)) == ("ready", [[], []])
    engines.shut(COMPLETE, B)
    forgotten = []
    trainer.house.fleet.watch_forgotten(lambda worker: forgotten.append(worker.url))
    async with trio.open_nursery() as nursery:
        answers = []

        async def complete():
            answers.append(await trainer.ask(COMPLETE, flush_cache=True, weight_version="v2"))

        nursery.start_soon(complete)
        await engines.came[B, COMPLETE].wait()
        assert held(trainer.house) == [["updating"], ["updating"]]
        assert set(versions(trainer.house).values()) == {(None, 0)}
        assert trainer.house.desk.sync.status()["members"][0]["standing"] == "updating"
        engines.open(COMPLETE, B)
    (answer,) = answers
    assert answer.status == 200, answer.body
    assert (answer.body["num_buckets_received"], answer.body["weight_version"]) == (1, "v2")
    assert answer.body["verification"]["checked"] == [A, B]
    assert versions(trainer.house) == {A: ("v2", 1), B: ("v2", 1)}
    assert held(trainer.house) == [[], []]
    assert sorted(forgotten) == [A, B]
    await trainer.well(DESTROY)
    assert (trainer.state, trainer.house.keeper.freeze.on) == ("idle", False)


async def test_what_is_malformed_arms_nobody_and_costs_no_group(trainer, engines):
    await trainer.join()
    answer = await trainer.ask(PREPARE, num_buckets=2, buckets=[TENSORS])
    assert (answer.status, trainer.state) == (400, "grouped")
    assert not engines.bodies(PREPARE, A)
    await trainer.well(PREPARE, **BUCKETS)


async def test_one_that_refuses_to_arm_disarms_all_and_is_named(trainer, engines):
    await trainer.join()
    engines.tell(B, PREPARE, {"success": False, "message": "armed already"}, 409)
    answer = await trainer.ask(PREPARE, **BUCKETS)
    assert answer.body["message"] == f"{B}: status 409: armed already"
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A)
    assert not engines.bodies(COMPLETE, A)
    later = await trainer.ask(COMPLETE)
    assert later.status == 400
    assert B in later.body["message"]
    assert uncertain(trainer.house) == []


@pytest.mark.parametrize(
    ("path", "after_prepare", "status"),
    [(COMPLETE, False, 400), (PREPARE, True, 409), (UPDATE, True, 409)],
)
async def test_calls_out_of_place_are_refused(trainer, path, after_prepare, status):
    await (trainer.arm() if after_prepare else trainer.join())
    before = trainer.state
    answer = await trainer.ask(path, **TENSORS)
    assert (answer.status, trainer.state) == (status, before)


@pytest.mark.parametrize("path", [PREPARE, COMPLETE, UPDATE, DESTROY])
async def test_without_a_group_nothing_can_be_asked_of_it(trainer, engines, path):
    answer = await trainer.ask(path, **TENSORS)
    assert answer.status == 400
    assert not engines.bodies(path, A)


async def test_a_group_of_another_name_is_none(trainer):
    await trainer.join()
    answer = await trainer.ask(PREPARE, **BUCKETS, group_name="other")
    assert answer.status == 400
    assert "there is no group 'other'" in answer.body["message"]


async def test_replicas_that_differ_are_kept_out_and_it_is_no_success(trainer, engines):
    engines.sums[B] = "other"
    await trainer.arm()
    answer = await trainer.ask(COMPLETE, weight_version="v2")
    assert answer.status == 502
    assert "checksums differ" in answer.body["message"]
    assert uncertain(trainer.house) == [A, B]
    assert held(trainer.house) == [["uncertain"], ["uncertain"]]


async def test_one_that_is_lost_is_kept_out_and_the_other_goes_on_with_the_new(trainer, engines):
    await trainer.arm()
    engines.says[B, COMPLETE] = LOST
    answer = await trainer.ask(COMPLETE, weight_version="v2")
    assert (answer.status, answer.body["weight_version"]) == (502, "v2")
    assert uncertain(trainer.house) == [B]
    assert versions(trainer.house)[A] == ("v2", 1)
    await trainer.until("idle")
    assert held(trainer.house) == [[], ["uncertain"]]


async def test_what_one_plainly_refuses_is_not_believed_of_the_only_other(trainer, engines):
    await trainer.arm()
    engines.tell(B, COMPLETE, {"success": False, "message": "the trainer sent fewer"}, 400)
    answer = await trainer.ask(COMPLETE, weight_version="v2")
    assert answer.status == 400
    assert uncertain(trainer.house) == [A, B]
    assert trainer.house.desk.book.published.epoch == 0


async def test_what_all_refuse_changed_nobody(trainer, engines):
    before = versions(trainer.house)
    await trainer.arm()
    for url in (A, B):
        engines.tell(url, COMPLETE, {"success": False, "message": "the trainer is gone"}, 400)
    answer = await trainer.ask(COMPLETE)
    assert (answer.status, uncertain(trainer.house)) == (400, [])
    await trainer.until("idle")
    assert (held(trainer.house), versions(trainer.house)) == ([[], []], before)


async def test_a_member_whose_checksum_can_not_be_read_is_not_agreed_with(trainer, engines):
    await trainer.arm()
    engines.says[B, "/weights_checker"] = LOST
    answer = await trainer.ask(COMPLETE, weight_version="v2")
    assert (answer.status, uncertain(trainer.house)) == (502, [B])


# In parts


async def test_parts_are_one_sync_that_ends_with_its_group(trainer, engines):
    await trainer.join()
    for _ in range(3):
        await trainer.well(PREPARE, **TENSORS)
        told = await trainer.well(COMPLETE, flush_cache=False)
        assert "weight_epoch" not in told
        assert held(trainer.house) == [["updating"], ["updating"]]
        assert set(versions(trainer.house).values()) == {(None, 0)}
    engines.labels.update({A: "v2", B: "v2"})
    told = await trainer.well(DESTROY)
    assert (told["weight_epoch"], told["weight_version"]) == (1, "v2")
    assert held(trainer.house) == [[], []]
    assert versions(trainer.house) == {A: ("v2", 1), B: ("v2", 1)}


async def test_a_marked_last_part_is_published_when_generation_goes_on(trainer):
    await trainer.join()
    await trainer.well(UPDATE, **TENSORS, flush_cache=False)
    await trainer.well(UPDATE, **TENSORS, flush_cache=True, weight_version="v2")
    assert trainer.house.desk.sync.status()["open"]
    told = await trainer.well(CONTINUE)
    assert told["weight_version"] == "v2"
    assert versions(trainer.house) == {A: ("v2", 1), B: ("v2", 1)}
    assert trainer.state == "grouped"


async def test_going_on_in_the_middle_leaves_everybody_in_doubt(trainer):
    await trainer.join()
    await trainer.well(UPDATE, **TENSORS, flush_cache=False)
    told = await trainer.well(CONTINUE)
    assert sorted(told["uncertain"]) == [A, B] == uncertain(trainer.house)
    assert held(trainer.house) == [["uncertain"], ["uncertain"]]


async def test_the_end_of_a_session_ends_the_round(trainer):
    await trainer.join()
    await trainer.well(UPDATE, **TENSORS, flush_cache=False, weight_version="v2")
    told = await trainer.well(END)
    assert (told["weight_epoch"], versions(trainer.house)[A]) == (1, ("v2", 1))


async def test_a_part_that_one_does_not_take_leaves_everybody_in_doubt(trainer, engines):
    await trainer.join()
    await trainer.well(UPDATE, **TENSORS, flush_cache=False)
    engines.tell(B, UPDATE, {"success": False, "message": "no"}, 400)
    answer = await trainer.ask(UPDATE, **TENSORS, flush_cache=False)
    assert answer.body["message"] == f"{B}: status 400: no"
    await trainer.until("idle")
    assert uncertain(trainer.house) == [A, B]
    assert trainer.house.desk.book.published.epoch == 0


async def test_nothing_else_is_loaded_while_a_sync_is_open(trainer, engines):
    await trainer.join()
    assert (await trainer.ask(DISK, model_path="m")).ok
    await trainer.well(UPDATE, **TENSORS, flush_cache=False)
    answer = await trainer.ask(DISK, model_path="m")
    assert answer.status == 409
    assert "group 'g'" in answer.body["message"]


# Back in


async def test_who_was_in_doubt_is_healed_by_all_of_what_was_sent_in_vain(trainer, engines):
    engines.tensors = ("a", "b", "c")  # one of them is never sent: it is nobody's doubt
    await trainer.arm()
    engines.sums[B] = "other"
    assert not (await trainer.ask(COMPLETE, weight_version="v2")).ok
    engines.sums[B] = engines.sums[A]
    part = {"names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
    await trainer.well(PREPARE, num_buckets=1, buckets=[part])
    await trainer.well(COMPLETE, weight_version="v3")
    assert uncertain(trainer.house) == [A, B]
    await trainer.well(PREPARE, **BUCKETS)
    await trainer.well(COMPLETE, weight_version="v4")
    assert uncertain(trainer.house) == []
    assert held(trainer.house) == [[], []]


async def test_a_part_does_not_heal_what_it_does_not_touch(trainer, engines):
    engines.tell(A, DISK, {}, 500)
    engines.tell(B, DISK, {}, 500)
    assert not (await trainer.ask(DISK, model_path="m")).ok
    engines.tensors = ("a", "b", "c")
    await trainer.arm()
    await trainer.well(COMPLETE, weight_version="v2")
    assert uncertain(trainer.house) == [A, B]
    engines.tensors = ("a", "b")
    await trainer.well(PREPARE, **BUCKETS)
    await trainer.well(COMPLETE, weight_version="v3")
    assert uncertain(trainer.house) == []


# Whose it is


async def test_a_second_trainer_is_told_of_the_first_while_that_one_lives(trainer):
    await trainer.arm()
    async with store_of_a_trainer() as other:
        answer = await trainer.ask(INIT, **init_body(other, group_name="mine"))
    assert answer.status == 409
    for part in ("'g'", f"127.0.0.1:{trainer.store.port}", "step armed"):
        assert part in answer.body["message"]
    assert answer.body["owner"]["master"] == f"127.0.0.1:{trainer.store.port}"
    assert (await trainer.well(COMPLETE, weight_version="v2"))["weight_epoch"] == 1


async def test_force_takes_it_over(trainer, engines):
    await trainer.arm()
    async with store_of_a_trainer() as other:
        body = init_body(other, group_name="mine", force=True)
        assert (await trainer.ask(INIT, **body)).ok
        assert engines.bodies(DESTROY, A) == [{"group_name": "g"}]
        assert trainer.house.desk.sync.status()["owner"]["group_name"] == "mine"


async def test_a_trainer_that_dies_is_answered_for(trainer, engines):
    await trainer.arm()
    trainer.store.die()
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
    answer = await trainer.ask(COMPLETE)
    assert answer.status == 400
    assert "the trainer is gone" in answer.body["message"]
    assert uncertain(trainer.house) == []
    async with store_of_a_trainer() as other:
        assert (await trainer.ask(INIT, **init_body(other))).ok


async def test_a_trainer_that_is_stopped_is_given_up_when_it_has_been_silent_for_too_long(trainer):
    await trainer.arm()
    trainer.store.silent = True
    await trainer.until("idle")
    assert "has not answered for 1 s" in trainer.house.desk.sync.status()["last_cause"]


async def test_a_trainer_that_dies_in_the_middle_of_its_parts_leaves_doubt(trainer):
    await trainer.join()
    await trainer.well(UPDATE, **TENSORS, flush_cache=False)
    trainer.store.die()
    await trainer.until("idle")
    assert uncertain(trainer.house) == [A, B]
    assert held(trainer.house) == [["uncertain"], ["uncertain"]]


async def test_its_end_does_not_wait_for_what_runs(trainer, engines, nursery):
    await trainer.arm()
    engines.shut(COMPLETE)
    nursery.start_soon(trainer.house.desk.submit, asks(COMPLETE))
    await engines.came[A, COMPLETE].wait()
    with trio.fail_after(15):
        asked = await trainer.ask(DESTROY)
    assert asked.ok
    assert trainer.state == "idle"


async def test_what_is_armed_is_disarmed_by_its_end(trainer, engines):
    await trainer.arm()
    await trainer.well(DESTROY)
    assert (trainer.state, uncertain(trainer.house)) == ("idle", [])
    assert not engines.bodies(COMPLETE, A)
    await trainer.join()


# Members come and go


async def test_a_member_that_is_gone_ends_it_by_name(trainer, listening, engines):
    await trainer.arm()
    listening[B].set()
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A)
    answer = await trainer.ask(COMPLETE)
    assert answer.status == 400
    assert f"{B} is lost: nobody listens" in answer.body["message"]


async def test_a_member_that_is_dead_by_its_probes_ends_it_too(trainer):
    await trainer.arm()
    trainer.house.fleet.mark_dead(trainer.house.worker(B), NOW)
    assert trainer.house.worker(B).machine.state is Health.DEAD
    await trainer.until("idle")
    assert B in trainer.house.desk.sync.status()["last_cause"]


async def test_a_member_that_did_not_leave_is_told_again_before_it_joins(
    trainer, engines, monkeypatch
):
    monkeypatch.setattr(sync_life, "UNDO_SECS", 0.1)
    await trainer.join()
    engines.shut(DESTROY, B)
    answer = await trainer.ask(DESTROY)
    assert (answer.status, trainer.state) == (502, "idle")
    engines.open(DESTROY, B)
    await trainer.join()
    assert len(engines.bodies(DESTROY, B)) == 2
    assert len(engines.bodies(DESTROY, A)) == 1


# Callers come and go


async def test_a_caller_that_leaves_stops_nothing_and_hears_it_later(trainer, engines):
    await trainer.arm()
    engines.shut(COMPLETE, B)
    with trio.move_on_after(0.1):
        await trainer.ask(COMPLETE, weight_version="v2")
    engines.open(COMPLETE, B)
    await trainer.until("grouped")
    await wait_all_tasks_blocked(0.01)
    told = await trainer.well(COMPLETE, weight_version="v2")
    assert told["weight_version"] == "v2"
    assert len(engines.bodies(COMPLETE, A)) == 1
    again = await trainer.ask(COMPLETE, weight_version="v3")
    assert again.status == 400


async def test_a_prepare_that_nobody_heard_is_answered_when_it_is_asked_again(trainer, engines):
    await trainer.join()
    engines.shut(PREPARE, B)
    with trio.move_on_after(0.1):
        await trainer.ask(PREPARE, **BUCKETS)
    engines.open(PREPARE, B)
    await trainer.until("armed")
    await wait_all_tasks_blocked(0.01)
    assert (await trainer.well(PREPARE, **BUCKETS))["status"] == "ready"
    assert len(engines.bodies(PREPARE, A)) == 1


# Written down


async def test_what_is_armed_is_written_down_and_doubted_after_a_restart(
    trainer, folder, engines, nursery
):
    await trainer.join()
    sync = decode((folder / "journal.json").read_bytes())
    assert (sync.sync.step, sync.sync.targets, sync.at_start()) == ("grouped", (A, B), {})
    await trainer.well(PREPARE, **BUCKETS)
    assert decode((folder / "journal.json").read_bytes()).sync.step == "arming"
    later = sync_house(folder)
    assert uncertain(later) == [A, B]
    await nursery.start(later.desk.run)
    with trio.fail_after(5):
        while not engines.bodies(DESTROY, B):  # noqa: ASYNC110  # nobody is asked for it
            await trio.sleep(0.01)
    assert engines.bodies(DESTROY, A) == [{"group_name": "g"}]


async def test_nothing_is_sent_that_can_not_be_written_down(trainer, engines, monkeypatch):
    await trainer.join()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.house.desk.book._file, "write", full)
    answer = await trainer.ask(PREPARE, **BUCKETS)
    assert (answer.status, answer.body["error"]["code"]) == (503, "journal_unwritable")
    assert not engines.bodies(PREPARE, A)
    await trainer.until("idle")


async def test_a_sync_leaves_nothing_in_the_journal(trainer, folder):
    await trainer.arm()
    await trainer.well(COMPLETE, weight_version="v2")
    await trainer.well(DESTROY)
    assert not (folder / "journal.json").exists()
    assert json.loads((folder / "epoch.json").read_bytes())["epoch"] == 1


async def test_who_comes_up_after_a_sync_is_kept_out_until_it_has_told_what_it_has(
    trainer, engines
):
    await trainer.arm()
    await trainer.well(COMPLETE, weight_version="v2")
    await trainer.well(DESTROY)
    worker, fleet = trainer.house.worker(B), trainer.house.fleet
    engines.labels[B] = "default"
    engines.shut("/model_info", B)
    fleet.versioned(worker, None, 0)  # it was seen to begin anew
    fleet.forgotten(worker)
    assert (worker.holds, worker.routable) == ({"unproven"}, False)
    await engines.came[B, "/model_info"].wait()
    engines.open("/model_info", B)
    with trio.fail_after(5):
        while "uncertain" not in worker.holds:
            await trio.sleep(0.01)
            assert not worker.routable
    assert "missed the update to 'v2'" in trainer.house.desk.book.reasons[B]


async def test_who_comes_up_with_the_weights_of_the_last_sync_is_let_in(trainer, engines):
    await trainer.arm()
    await trainer.well(COMPLETE, weight_version="v2")
    worker, fleet = trainer.house.worker(B), trainer.house.fleet
    fleet.versioned(worker, None, 0)
    fleet.forgotten(worker)
    with trio.fail_after(5):
        while worker.holds:  # noqa: ASYNC110  # nobody is asked for it
            await trio.sleep(0.01)
    assert versions(trainer.house)[B] == ("v2", 1)
