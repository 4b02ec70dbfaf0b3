"""What a request in two legs costs beside a plain one, in bytecodes: these do not depend on the
machine's load. The goal of docs/performance.md, at most 2.2 times, is for CPU time."""

import contextlib
import json
import sys

import pytest

import omni_proxy
from tests.dataplane.both_drivers import World, chat_request, worker_sockets
from tests.dataplane.disaggregation.pair_world import NAMES, PREFILL, answer, world_of

MOST = 2.2
REQUESTS = 5
FOLDER = omni_proxy.__path__[0]
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "a ferry " * 20}], "max_tokens": 64}
).encode()
REQUEST = chat_request(body=BODY, fields=(b"accept-encoding: gzip", b"user-agent: test"))
WHOLE = answer(b'{"choices": [], "usage": {}}')


def bytecodes(folder, new_world, exchange):
    """Of the proxy, for each of some equal requests."""
    counted = 0

    def trace(frame, event, _):
        nonlocal counted
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(folder, "".join(NAMES))
        listeners = {name: stack.enter_context(each) for name, each in sockets.items()}
        world = stack.enter_context(new_world(listeners).at_work())
        recorders = world.dataplane.recorders
        recorders.access_log = recorders.route_log = None
        client = world.connect_client()
        for _ in range(12):
            exchange(world, client)
        world.began = world.handed_over = 0
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(REQUESTS):
                exchange(world, client)
        finally:
            sys.settrace(before)
        assert (world.began, world.handed_over) == (REQUESTS, 0)
        world.finish()
    return counted / REQUESTS


def serve_plain(world, client):
    world.ask(client, REQUEST)
    world.answer(WHOLE)


def serve_pair(world, client):
    world.ask(client, REQUEST)
    world.prefill(answer(PREFILL))
    world.decode(WHOLE)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_pair_takes_at_most_so_many_times_the_bytecodes_of_a_plain_request(tmp_path, ranks):
    def plain_world(listeners):
        fields = {name: {"ranks": ranks} for name in NAMES}
        return World(listeners, "[server]\n", fields=fields)

    def counted(name, new_world, exchange):
        folder = tmp_path / name
        folder.mkdir()
        return bytecodes(folder, new_world, exchange)

    plain = counted("plain", plain_world, serve_plain)
    for connector in ("sglang", "nixl", "mooncake"):
        pair = counted(connector, world_of(connector, ranks), serve_pair)
        assert plain < pair < MOST * plain, connector
