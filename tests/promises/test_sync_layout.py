"""One trainer, one endpoint, replicas of several ranks: who gets which, and what can't be."""

import socket

import pytest

from tests.promises.sync_program import INIT, init_body
from tests.promises.sync_steps import Begun


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


async def test_the_endpoint_counts_the_ranks_of_all_its_replicas(seen):
    for path in ("/server_info", "/get_server_info"):
        assert (await seen.told(path))["tp_size"] == 3


async def test_ranks_follow_each_other_over_the_replicas_and_one_answer_tells_of_all(
    seen, trainers
):
    over_two, alone = seen.fleet.replicas
    begun = await Begun(seen, trainers.one()).join()
    offsets = {each["worker"]: data_of(each)["rank_offset"] for each in begun.joined["results"]}
    assert offsets == {over_two.url: 1, alone.url: 3}
    await begun.end()


async def test_numbers_may_come_as_text(seen, trainers):
    begun = Begun(seen, trainers.one())
    begun.trainer.order("open", world=4)
    body = init_body((await begun.trainer.reply())["port"], 4)
    texts = {key: str(body[key]) for key in ("master_port", "rank_offset", "world_size")}
    status, told = await seen.post(INIT, **body | texts)
    assert (status, told["success"]) == (200, True), told
    assert await begun.trainer.reply() == {"joined": True}
    await begun.end()


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
