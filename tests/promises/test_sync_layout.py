"""One trainer, one endpoint, replicas of several ranks: who gets which, and what can't be."""

import socket

import pytest
import trio

from tests.promises.sync_program import DESTROY, INIT, fleet, init_body
from tests.promises.sync_trainer import Trainers

pytest.importorskip("torch")
pytest.importorskip("tiktoken")


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(60):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("layout"), ("--tp", "2"), ()) as it:
        yield it


@pytest.fixture(scope="module")
def trainers():
    made = Trainers()
    yield made
    made.close()


@pytest.fixture
async def seen(running):
    async with running.client() as it:
        await it.ready()
        yield it


async def test_the_endpoint_counts_the_ranks_of_all_its_replicas(seen):
    for path in ("/server_info", "/get_server_info"):
        assert (await seen.told(path))["tp_size"] == 3


async def test_ranks_follow_each_other_over_the_replicas_and_one_answer_tells_of_all(
    seen, trainers
):
    over_two, alone = seen.fleet.replicas
    trainer = trainers.one()
    trainer.order("open", world=4)
    port = (await trainer.reply())["port"]
    status, told = await seen.post(INIT, **init_body(port, 4))
    assert (status, told["success"]) == (200, True), told
    assert await trainer.reply() == {"joined": True}
    offsets = {each["worker"]: data_of(each)["rank_offset"] for each in told["results"]}
    assert offsets == {over_two.url: 1, alone.url: 3}
    assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
    await trainer.tell("leave")


async def test_numbers_may_come_as_text(seen, trainers):
    trainer = trainers.one()
    trainer.order("open", world=4)
    port = (await trainer.reply())["port"]
    body = init_body(port, 4)
    body |= {"master_port": str(port), "rank_offset": "1", "world_size": "4"}
    status, told = await seen.post(INIT, **body)
    assert (status, told["success"]) == (200, True), told
    assert await trainer.reply() == {"joined": True}
    assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
    await trainer.tell("leave")


@pytest.mark.parametrize(
    ("offset", "world"), [(4, 4), (2, 4), (0, 4), (1, 3)], ids=["4", "2", "0", "a small world"]
)
async def test_ranks_that_do_not_fit_are_refused_with_the_numbers_and_no_replica_is_asked(
    seen, offset, world
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        body = init_body(port, world) | {"rank_offset": offset}
        status, told = await seen.post(INIT, **body)
        assert (status, told["success"]) == (400, False), told
        assert f"rank_offset {offset}" in told["message"]
        if offset:
            assert "3 ranks" in told["message"]
            assert f"world_size is {world}" in told["message"]
        # A replica that had been asked would be dialling by now.
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not (await seen.told("/weights"))["uncertain"]


def data_of(entry):
    """What a replica's text stage said of itself, wherever it stands in the answer."""
    pending = [entry]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            if "rank_offset" in found:
                return found
            found = list(found.values())
        pending.extend(found if isinstance(found, list) else [])
    raise AssertionError(entry)
