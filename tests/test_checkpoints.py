import ast
from textwrap import dedent

import pytest

from tests.checkpoints import Tree
from tests.tree import name_of, parsed, sources

ENDS = "an iteration without a checkpoint is the last one"
FEWER = "each iteration leaves less to do, or pauses"
QUEUED = "it reads only what is already queued, and the queue is bounded"
# Loops that keep the rule in a way that the syntax does not show, with reasons.
ALLOWED = {
    "omni_proxy.dataplane.attempt.attempt.run_attempt": "two iterations at most: one idle connection may be broken",
    "omni_proxy.dataplane.downstream.connection.serve": "a connection with a response has read or paused; a refusal "
    "counts turns",
    "omni_proxy.dataplane.loop.stream.flush": ENDS,
    "omni_proxy.dataplane.drivers.exchange_steps.respond_by_worker": "bounded by the tries of a request",
    "omni_proxy.simulate.simulation._respond": "bounded by the attempts of a request; there is no trio",
    "omni_proxy.dataplane.websocket_relay.connect_worker": "bounded by the tries of a request",
    "omni_proxy.dataplane.attempt.attempt._response_start": "`for_head` pauses",
    "omni_proxy.dataplane.loop.event_loop.run": "it runs trio's loop when trio needs it",
    "omni_proxy.dataplane.disaggregation.two_leg_request.first_response": "bounded by the tries of a request",
    "omni_proxy.dataplane.disaggregation.two_leg_request._first_chunk": "`wait_for_read` counts turns",
    "omni_proxy.dataplane.attempt.side_task.read_body": "`wait_for_read` counts turns",
    "omni_proxy.dataplane.attempt.side_task.wait_for": "`for_head` pauses",
    "omni_proxy.dataplane.loop.tls_stream._send_all": FEWER,
    "omni_proxy.dataplane.relay.request_body.stream_to": FEWER,
    "omni_proxy.dataplane.relay.request_body._flush": FEWER,
    "omni_proxy.multiprocess.ipc.channel.run_writer": "trio's `send` is a checkpoint",
    "omni_proxy.multiprocess.ipc.channel._send_first": "trio's `send` is a checkpoint",
    "omni_proxy.multiprocess.process_slot._receive_events": ENDS,
    "omni_proxy.multiprocess.dataplane_process._serve": ENDS,
    "omni_proxy.replica.api.common.sse.begin": QUEUED,
    "omni_proxy.replica.api.common.sse.__anext__": QUEUED,
    "omni_proxy.replica.api.speech.speech_socket._listen": "trio's `send` is a checkpoint",
    "omni_proxy.replica.api.speech.speech_socket._converse": "trio's `receive` is a checkpoint",
    "omni_proxy.replica.pipeline.stage_process._read": ENDS,
    "omni_proxy.runtime_config.reloader.run": "trio's `receive` is a checkpoint",
    "omni_proxy.runtime_config.config_store.change": "acquiring the lock is a checkpoint",
    "omni_proxy.runtime_config.config_store.follow_found": "acquiring the lock is a checkpoint",
    "omni_proxy.kv_events.event_follower._receive": ENDS,
    "omni_proxy.upgrade.outgoing._follow_successor": "it waits for a thread that receives",
    "omni_proxy.launch.launcher.wait_until_ready": "`wait_change` waits for an event",
    "omni_proxy.weight_sync.sync.endpoint._admit_owner": "`wait_idle` waits for an event",
}


@pytest.fixture(scope="module")
def quiet_loops():
    tree = Tree.of({name_of(path): parsed(path) for path in sources()})
    return {
        f"{name_of(path)}.{name}": f"{path}:{loop.lineno}"
        for path in sources()
        for name, loop in tree.quiet_loops(parsed(path))
    }


def test_no_loop_of_a_coroutine_may_spin_without_a_checkpoint(quiet_loops):
    """If it fails, add `await trio.lowlevel.checkpoint()` or a pause, or a reason to ALLOWED."""
    assert not [f"{where} {name}" for name, where in quiet_loops.items() if name not in ALLOWED]


def test_each_allowed_loop_exists(quiet_loops):
    assert not ALLOWED.keys() - quiet_loops.keys()


def functions_that_may_spin(code):
    module = ast.parse(dedent(code))
    return [name for name, _ in Tree.of({"m": module}).quiet_loops(module)]


HELPERS = """
    async def sure():
        await trio.sleep(1)
    async def maybe(self, event):
        loop = self.loops.get(event)
        while loop is not None:
            await loop.finished.wait()
            if loop.well:
                return
            loop = self.loops.get(event)
"""


@pytest.mark.parametrize(
    "loop",
    [
        "while not w.routable and find(url) is w:\n    await self.prober.maybe(w)",
        "while not w.routable:\n    with trio.move_on_after(5):\n        await maybe(w)",
        "while True:\n    await unknown()",
        "while True:\n    if a:\n        await sure()",
        "while True:\n    if a:\n        continue\n    await sure()",
        "while True:\n    try:\n        await sure()\n    except OSError:\n        continue",
        "while True:\n    try:\n        await sure()\n    except OSError:\n        pass",
        "while True:\n    with suppress(OSError):\n        await sure()",
        "while True:\n    for item in items:\n        await sure()",
        "while True:\n    a and await sure()",
        "while True:\n    b = [await sure() for c in d]",
        "while True:\n    async with client:\n        pass",
        "while a:\n    while b:\n        await sure()",
        "while True:\n    match a:\n        case 1:\n            await sure()",
        "while True:\n    async def later():\n        await sure()\n    await unknown()",
        "while True:\n    if a.must_wait_for(b):\n        c()\n    await unknown()",
    ],
)
def test_a_loop_that_may_spin_is_found(loop):
    code = HELPERS + "    async def f():\n" + "\n".join(" " * 8 + x for x in loop.splitlines())
    assert functions_that_may_spin(code) == ["f"]


@pytest.mark.parametrize(
    "loop",
    [
        "while not w.routable:\n    await maybe(w)\n    await trio.sleep(1)",
        "while True:\n    await sure()",
        "while True:\n    await event.wait()",
        "while True:\n    await pause",
        "while True:\n    if parser.must_wait_for(up):\n        await pause\n    read()",
        "while True:\n    if a:\n        await sure()\n    else:\n        return",
        "while True:\n    try:\n        await sure()\n    except OSError:\n        break",
        "while True:\n    try:\n        await pause\n    except Expired:\n        pass",
        "while True:\n    try:\n        await maybe()\n    finally:\n        await sure()",
        "while True:\n    with trio.move_on_after(1):\n        await sure()",
        "while True:\n    async with trio.open_nursery() as n:\n        n.start_soon(f)",
        "while True:\n    async with self._lock:\n        pass",
        "while a:\n    a -= 1",
        "while await sure():\n    pass",
        "while True:\n    for _ in range(TIMES):\n        await sure()",
        "while True:\n    while True:\n        await sure()\n        if a:\n            break",
    ],
)
def test_a_loop_with_checkpoints_is_not_found(loop):
    code = HELPERS + "    async def f():\n" + "\n".join(" " * 8 + x for x in loop.splitlines())
    assert functions_that_may_spin(code) == []


def test_a_method_of_an_annotated_name_is_looked_up_in_its_class():
    code = """
    class A:
        async def step(self):
            await trio.sleep(1)
    class B:
        async def step(self):
            pass
    class C(A):
        pass
    async def of_a(thing: C):
        while True:
            await thing.step()
    async def of_b(thing: B):
        while True:
            await thing.step()
    class D:
        def __init__(self, thing: A):
            self.thing = thing
        async def run(self):
            while True:
                await self.thing.step()
    """
    assert functions_that_may_spin(code) == ["of_b"]


def test_a_method_of_the_same_class_is_looked_up_there():
    code = """
    class A:
        async def step(self):
            await trio.sleep(1)
        async def run(self):
            while True:
                await self.step()
    class B:
        async def step(self):
            pass
        async def run(self):
            while True:
                await self.step()
    async def of_some(thing):
        while True:
            await thing.step()
    """
    assert sorted(functions_that_may_spin(code)) == ["of_some", "run"]
