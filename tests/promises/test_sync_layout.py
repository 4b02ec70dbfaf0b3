"""One trainer, one endpoint, replicas of several ranks: the rank layout, and its refusals."""

import socket

import pytest

from tests.promises.sync_program import INIT, init_body
from tests.promises.sync_steps import ManualSync


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


async def test_the_endpoint_counts_the_ranks_of_all_its_replicas(seen):
    for path in ("/server_info", "/get_server_info"):
        assert (await seen.get_json(path))["tp_size"] == 3


async def test_ranks_are_consecutive_over_the_replicas_and_the_response_lists_all(seen, trainers):
    over_two, alone = seen.fleet.replicas
    begun = await ManualSync(seen, trainers.one()).join()
    offsets = {each["worker"]: data_of(each)["rank_offset"] for each in begun.joined["results"]}
    assert offsets == {over_two.url: 1, alone.url: 3}
    await begun.end()


async def test_numbers_may_be_text(seen, trainers):
    begun = ManualSync(seen, trainers.one())
    begun.trainer.order("open", world=4)
    body = init_body((await begun.trainer.reply())["port"], 4)
    texts = {key: str(body[key]) for key in ("master_port", "rank_offset", "world_size")}
    status, reported = await seen.post(INIT, **body | texts)
    assert (status, reported["success"]) == (200, True), reported
    assert await begun.trainer.reply() == {"joined": True}
    await begun.end()


@pytest.mark.parametrize(
    ("offset", "world"), [(4, 4), (2, 4), (0, 4), (1, 3)], ids=["4", "2", "0", "a small world"]
)
async def test_ranks_that_do_not_fit_are_refused_before_any_call(seen, offset, world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        body = init_body(port, world) | {"rank_offset": offset}
        status, reported = await seen.post(INIT, **body)
        assert (status, reported["success"]) == (400, False), reported
        assert f"rank_offset {offset}" in reported["message"]
        if offset:
            assert "3 ranks" in reported["message"]
            assert f"world_size is {world}" in reported["message"]
        # A replica that was called would be connecting by now.
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not (await seen.get_json("/weights"))["uncertain"]


def data_of(entry):
    """The data of a replica's text stage, wherever the response has it."""
    pending = [entry]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            if "rank_offset" in found:
                return found
            found = list(found.values())
        pending.extend(found if isinstance(found, list) else [])
    raise AssertionError(entry)
