"""The layout of ranks over replicas with several ranks each, and errors in it."""

import socket

import pytest

from tests.promises.support.sync_program import INIT, init_body
from tests.promises.support.sync_steps import ManualSync


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


async def test_the_endpoint_counts_the_ranks_of_all_its_replicas(seen):
    for path in ("/server_info", "/get_server_info"):
        assert (await seen.get_json(path))["tp_size"] == 3


async def test_ranks_are_consecutive_over_the_replicas_and_the_response_lists_all(seen, trainers):
    with_two_ranks, with_one_rank = seen.fleet.replicas
    sync = await ManualSync(seen, trainers.one()).join()
    offsets = {
        result["worker"]: data_of(result)["rank_offset"] for result in sync.joined["results"]
    }
    assert offsets == {with_two_ranks.url: 1, with_one_rank.url: 3}
    await sync.end()


async def test_numbers_may_be_sent_as_strings(seen, trainers):
    sync = ManualSync(seen, trainers.one())
    sync.trainer.order("open", world=4)
    body = init_body((await sync.trainer.reply())["port"], 4)
    strings = {key: str(body[key]) for key in ("master_port", "rank_offset", "world_size")}
    status, result = await seen.post(INIT, **body | strings)
    assert (status, result["success"]) == (200, True), result
    assert await sync.trainer.reply() == {"joined": True}
    await sync.end()


@pytest.mark.parametrize(
    ("offset", "world"), [(4, 4), (2, 4), (0, 4), (1, 3)], ids=["4", "2", "0", "a small world"]
)
async def test_ranks_that_do_not_fit_are_rejected_before_any_replica_is_called(seen, offset, world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        body = init_body(port, world) | {"rank_offset": offset}
        status, result = await seen.post(INIT, **body)
        assert (status, result["success"]) == (400, False), result
        assert f"rank_offset {offset}" in result["message"]
        if offset:
            assert "3 ranks" in result["message"]
            assert f"world_size is {world}" in result["message"]
        # A replica that was called would be connecting by now.
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not (await seen.get_json("/weights"))["uncertain"]


def data_of(entry):
    """Returns the data of a replica's text stage, at any depth of the response."""
    pending = [entry]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "rank_offset" in value:
                return value
            value = list(value.values())
        pending.extend(value if isinstance(value, list) else [])
    raise AssertionError(entry)
