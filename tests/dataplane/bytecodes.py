"""How many bytecodes of the proxy a request takes: counts that do not depend on the machine's load.

The request is written as clients of inference servers write them, and the fast path is warm.
"""

import contextlib
import json
import sys

import omni_proxy
from tests.dataplane.both_drivers import chat_request, worker_sockets
from tests.dataplane.disaggregation.pair_world import answer

REQUESTS = 5
WARM = 12
FOLDER = omni_proxy.__path__[0]
WHOLE = answer(b'{"choices": [], "usage": {}}')


def small_post(*fields, model="m"):
    """A chat request, with these further header fields."""
    messages = [{"role": "user", "content": "a ferry " * 20}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 64}).encode()
    fields = (b"accept-encoding: gzip", b"user-agent: test", *fields)
    return chat_request(body=body, fields=fields)


def count_bytecodes(folder, names, new_world, serve, *, prepare=None, on_fast_path=True):
    """For each of some equal requests. `names`: of workers; `serve(world, client)`: one exchange;
    `prepare(world)`: before the first one."""
    counted = 0

    def trace(frame, event, _):
        nonlocal counted
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    folder.mkdir()
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(folder, "".join(names))
        listeners = {name: stack.enter_context(each) for name, each in sockets.items()}
        world = stack.enter_context(new_world(listeners).at_work())
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
    return counted / REQUESTS
