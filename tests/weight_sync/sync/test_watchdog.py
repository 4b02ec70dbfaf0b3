import math

import pytest
import trio

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.sync.watchdog import TrainerLink, is_store_reachable


@pytest.fixture
async def link(store):
    trainer_link = TrainerLink("127.0.0.1", store.port)
    yield trainer_link
    trainer_link.close()


async def test_a_trainer_that_disconnects_is_gone(store, link):
    await link.open()
    assert link.is_open
    store.die()
    assert await link.wait_gone(lambda: math.inf) == "its connection has ended"
    assert not await link.ping(1)


async def test_a_trainer_that_is_silent_for_the_limit_is_gone(store, link):
    await link.open()
    store.silent = True
    assert "has not answered for 0.5 s" in await link.wait_gone(lambda: 0.5)


async def test_a_second_connection_does_not_extend_the_ping_timeout(store, link):
    await link.open()
    store.silent = True
    with trio.fail_after(7.9):  # less than two timeouts
        await link.wait_gone(lambda: 4.0)


async def test_a_trainer_that_answered_a_ping_late_is_alive(store, link):
    await link.open()
    store.silent = True
    assert not await link.ping(0.2)
    store.silent = False
    assert await link.ping(2)
    assert await link.ping(2)


async def test_a_link_that_never_opened_is_not_alive(store, link):
    assert not await link.ping(1)


async def test_a_link_waits_until_the_store_listens(nursery):
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    link = TrainerLink("127.0.0.1", port)
    with trio.move_on_after(0.3) as scope:
        await link.open()
    assert scope.cancelled_caught
    assert not link.is_open
    link.close()


async def test_a_server_of_another_protocol_is_an_error(nursery):
    async def send_http_response(stream):
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n")
        await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, send_http_response, [listener])
    port = listener.socket.getsockname()[1]
    with pytest.raises(GroupError, match="another protocol"):
        await TrainerLink("127.0.0.1", port).open()
    assert not await is_store_reachable("127.0.0.1", port, 2)


async def test_a_store_can_be_probed_without_keeping_a_connection(store):
    assert await is_store_reachable("127.0.0.1", store.port, 5)
