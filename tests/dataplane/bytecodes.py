"""Counts the bytecodes that the proxy runs for a request: they do not depend on the machine's load.

The request looks like those of clients of inference servers, and the fast path is warm.
"""

import contextlib
import json
import sys

import omni_proxy
from tests.dataplane.both_drivers import chat_request, worker_sockets
from tests.dataplane.disaggregation.pair_world import response_with

REQUESTS = 5
WARM = 12
FOLDER = omni_proxy.__path__[0]
OK_RESPONSE = response_with(b'{"choices": [], "usage": {}}')


def small_post(*fields, model="m"):
    """A chat request with additional header fields."""
    messages = [{"role": "user", "content": "a ferry " * 20}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 64}).encode()
    fields = (b"accept-encoding: gzip", b"user-agent: test", *fields)
    return chat_request(body=body, fields=fields)


def count_bytecodes(folder, names, new_world, serve, *, prepare=None, on_fast_path=True):
    """The bytecodes per request.

    `names` are the names of the workers. `serve(world, client)` does one exchange. `prepare(world)`
    runs before the first one.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    folder.mkdir()
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(folder, "".join(names))
        listeners = {name: stack.enter_context(sock) for name, sock in sockets.items()}
        world = stack.enter_context(new_world(listeners).patched())
        recorders = world.dataplane.recorders
        recorders.access_log = recorders.route_log = None
        if prepare is not None:
            prepare(world)
        client = world.connect_client()
        for _ in range(WARM):
            serve(world, client)
        world.began = world.handed_over = 0
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(REQUESTS):
                serve(world, client)
        finally:
            sys.settrace(before)
        if on_fast_path:
            assert (world.began, world.handed_over) == (REQUESTS, 0)
        world.finish()
    return count / REQUESTS
