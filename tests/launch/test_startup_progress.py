import trio

from omni_proxy.launch.launcher import wait_until_ready


class Replicas:
    def __init__(self, *urls):
        self.rows = {url: {"url": url, "state": "starting", "last_error": None} for url in urls}
        self.changed = trio.Event()

    def status(self):
        return list(self.rows.values())

    async def wait_change(self):
        await self.changed.wait()

    def set(self, url, state, error=None):
        self.rows[url].update(state=state, last_error=error)
        self.changed.set()
        self.changed = trio.Event()


async def test_each_ready_replica_is_reported_and_the_last_one_ends_the_wait(autojump_clock):
    replicas, lines = Replicas("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_ready, replicas.status, replicas.wait_change, lines.append)
        await trio.sleep(2)
        replicas.set("b", "ready")
        await trio.sleep(1)
        assert lines == ["starting 2 replicas", "replica 1 of 2 is ready after 2.0 s: b"]
        replicas.set("a", "ready")
    assert lines[-1] == "replica 2 of 2 is ready after 3.0 s: a"


async def test_a_failure_is_reported_once_with_its_reason(autojump_clock):
    replicas, lines = Replicas("a"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_ready, replicas.status, replicas.wait_change, lines.append)
        for state in ("backing_off", "starting", "backing_off"):
            await trio.sleep(1)
            replicas.set("a", state, "exit status 2")
        await trio.sleep(1)
        assert lines[1:] == ["replica a is not ready: exit status 2; it is tried again"]
        replicas.set("a", "backing_off", "exit status 3")
        await trio.sleep(1)
        assert lines[-1] == "replica a is not ready: exit status 3; it is tried again"
        replicas.set("a", "ready", "exit status 3")


async def test_a_replica_that_has_stopped_is_reported_and_not_waited_for(autojump_clock):
    replicas, lines = Replicas("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_ready, replicas.status, replicas.wait_change, lines.append)
        await trio.sleep(1)
        replicas.set("b", "ready")
        await trio.sleep(1)
        replicas.set("a", "stopped", "exit status 2")
    assert lines[-1] == "replica a is not ready: exit status 2; it is not tried again"


async def test_a_replica_that_fails_after_it_was_ready_is_waited_for_again(autojump_clock):
    replicas, lines = Replicas("a", "b"), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_ready, replicas.status, replicas.wait_change, lines.append)
        await trio.sleep(1)
        replicas.set("a", "ready")
        await trio.sleep(1)
        replicas.set("a", "backing_off", "killed")
        await trio.sleep(1)
        replicas.set("b", "ready")
        await trio.sleep(1)
        assert "replica 1 of 2 is ready after 3.0 s: b" in lines
        replicas.set("a", "ready")
    assert lines[-1].startswith("replica 2 of 2")


async def wait_result(replicas, *steps, startup_secs=600.0):
    """The result, the seconds until it, and the printed lines. Each second one step happens."""
    lines, results = [], []

    async def wait():
        results.append(
            await wait_until_ready(
                replicas.status, replicas.wait_change, lines.append, startup_secs
            )
        )

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for url, state, error, fields in steps:
            await trio.sleep(1)
            replicas.rows[url].update(fields)
            replicas.set(url, state, error)
    return results[0], trio.current_time() - began, lines


FATAL = ("process ended with exit status 2; last line: no such flag", {"fatal": True})


async def test_a_fatal_failure_ends_the_wait_at_once(autojump_clock):
    reason, secs, lines = await wait_result(Replicas("a"), ("a", "backing_off", *FATAL))
    assert (reason, secs) == ("no replica can be started", 1)
    assert lines[-1] == f"replica a is not ready: {FATAL[0]}; it is not tried again"


async def test_the_wait_ends_when_all_replicas_have_failed(
    autojump_clock,
):
    steps = (("a", "backing_off", *FATAL), ("a", "starting", *FATAL), ("b", "backing_off", *FATAL))
    reason, secs, _ = await wait_result(Replicas("a", "b"), *steps)
    assert (reason, secs) == ("no replica can be started", 3)


async def test_five_failed_attempts_of_each_replica_end_the_wait(autojump_clock):
    steps = [("a", "backing_off", "it died", {"restarts": restarts}) for restarts in range(5)]
    reason, secs, lines = await wait_result(Replicas("a"), *steps)
    assert (reason, secs) == ("no replica can be started", 5)
    assert lines[1:] == ["replica a is not ready: it died; it is tried again"]


async def test_the_wait_for_the_first_replica_is_bounded(autojump_clock):
    reason, secs, _ = await wait_result(Replicas("a"), startup_secs=7)
    assert (reason, secs) == ("no replica was ready within 7 s", 8)


async def test_once_a_replica_was_ready_the_others_are_waited_for(autojump_clock):
    steps = [("b", "ready", None, {})]
    steps += [("a", "backing_off", "it died", {"restarts": restarts}) for restarts in range(9)]
    steps += [("a", "ready", None, {})]
    reason, secs, lines = await wait_result(Replicas("a", "b"), *steps, startup_secs=3)
    assert (reason, secs) == ("", 11)
    assert "replica a is not ready: it died; it is tried again" in lines
