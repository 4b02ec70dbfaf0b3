import trio

from omni_proxy.watch.progress import until_ready


class Places:
    def __init__(self, *urls):
        self.places = {url: {"url": url, "state": "starting", "last_error": None} for url in urls}
        self.moved = trio.Event()

    def status(self):
        return list(self.places.values())

    async def until_moved(self):
        await self.moved.wait()

    def set(self, url, state, error=None):
        self.places[url].update(state=state, last_error=error)
        self.moved.set()
        self.moved = trio.Event()


async def test_each_replica_is_told_when_it_is_ready_and_the_last_one_ends_it(autojump_clock):
    places, said = Places("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_ready, places.status, places.until_moved, said.append)
        await trio.sleep(2)
        places.set("b", "ready")
        await trio.sleep(1)
        assert said == ["starting 2 replicas", "replica 1 of 2 is ready after 2.0 s: b"]
        places.set("a", "ready")
    assert said[-1] == "replica 2 of 2 is ready after 3.0 s: a"


async def test_a_failure_is_told_once_with_its_reason(autojump_clock):
    places, said = Places("a"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_ready, places.status, places.until_moved, said.append)
        for state in ("backing_off", "starting", "backing_off"):
            await trio.sleep(1)
            places.set("a", state, "exit status 2")
        await trio.sleep(1)
        assert said[1:] == ["replica a is not ready: exit status 2; it is tried again"]
        places.set("a", "backing_off", "exit status 3")
        await trio.sleep(1)
        assert said[-1] == "replica a is not ready: exit status 3; it is tried again"
        places.set("a", "ready", "exit status 3")


async def test_one_that_is_given_up_for_good_is_told_and_not_waited_for(autojump_clock):
    places, said = Places("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_ready, places.status, places.until_moved, said.append)
        await trio.sleep(1)
        places.set("b", "ready")
        await trio.sleep(1)
        places.set("a", "stopped", "exit status 2")
    assert said[-1] == "replica a is not ready: exit status 2; it is not tried again"


async def test_one_that_was_ready_and_fell_back_is_waited_for_again(autojump_clock):
    places, said = Places("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_ready, places.status, places.until_moved, said.append)
        await trio.sleep(1)
        places.set("a", "ready")
        await trio.sleep(1)
        places.set("a", "backing_off", "killed")
        await trio.sleep(1)
        places.set("b", "ready")
        await trio.sleep(1)
        assert "replica 1 of 2 is ready after 3.0 s: b" in said
        places.set("a", "ready")
    assert said[-1].startswith("replica 2 of 2")
