import trio

from omni_proxy.launch.startup_progress import wait_until_ready


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
        nursery.start_soon(wait_until_ready, places.status, places.until_moved, said.append)
        await trio.sleep(2)
        places.set("b", "ready")
        await trio.sleep(1)
        assert said == ["starting 2 replicas", "replica 1 of 2 is ready after 2.0 s: b"]
        places.set("a", "ready")
    assert said[-1] == "replica 2 of 2 is ready after 3.0 s: a"


async def test_a_failure_is_told_once_with_its_reason(autojump_clock):
    places, said = Places("a"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_ready, places.status, places.until_moved, said.append)
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
        nursery.start_soon(wait_until_ready, places.status, places.until_moved, said.append)
        await trio.sleep(1)
        places.set("b", "ready")
        await trio.sleep(1)
        places.set("a", "stopped", "exit status 2")
    assert said[-1] == "replica a is not ready: exit status 2; it is not tried again"


async def test_one_that_was_ready_and_fell_back_is_waited_for_again(autojump_clock):
    places, said = Places("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_ready, places.status, places.until_moved, said.append)
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


async def gave_up(places, *steps, startup_secs=600.0):
    """What is said for the reason, and when, where each second one of `steps` happens."""
    said, ended = [], []

    async def wait():
        ended.append(
            await wait_until_ready(places.status, places.until_moved, said.append, startup_secs)
        )

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for url, state, error, more in steps:
            await trio.sleep(1)
            places.places[url].update(more)
            places.set(url, state, error)
    return ended[0], trio.current_time() - began, said


FATAL = ("process ended with exit status 2; last line: no such flag", {"fatal": True})


async def test_what_can_not_start_is_given_up_at_once_with_its_own_words(autojump_clock):
    reason, secs, said = await gave_up(Places("a"), ("a", "backing_off", *FATAL))
    assert (reason, secs) == ("no replica can be started", 1)
    assert said[-1] == f"replica a is not ready: {FATAL[0]}; it is not tried again"


async def test_it_is_given_up_once_no_replica_can_start_at_whatever_moment_each_says_so(
    autojump_clock,
):
    steps = (("a", "backing_off", *FATAL), ("a", "starting", *FATAL), ("b", "backing_off", *FATAL))
    reason, secs, _ = await gave_up(Places("a", "b"), *steps)
    assert (reason, secs) == ("no replica can be started", 3)


async def test_five_failed_tries_of_each_are_enough(autojump_clock):
    steps = [("a", "backing_off", "it died", {"restarts": made}) for made in range(5)]
    reason, secs, said = await gave_up(Places("a"), *steps)
    assert (reason, secs) == ("no replica can be started", 5)
    assert said[1:] == ["replica a is not ready: it died; it is tried again"]


async def test_nobody_waits_for_ever_for_the_first_one(autojump_clock):
    reason, secs, _ = await gave_up(Places("a"), startup_secs=7)
    assert (reason, secs) == ("no replica was ready within 7 s", 8)


async def test_once_one_was_ready_the_others_are_waited_for_whatever_befalls_them(autojump_clock):
    steps = [("b", "ready", None, {})]
    steps += [("a", "backing_off", "it died", {"restarts": made}) for made in range(9)]
    steps += [("a", "ready", None, {})]
    reason, secs, said = await gave_up(Places("a", "b"), *steps, startup_secs=3)
    assert (reason, secs) == ("", 11)
    assert "replica a is not ready: it died; it is tried again" in said
