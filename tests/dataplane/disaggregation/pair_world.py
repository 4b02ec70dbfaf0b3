"""A `both_drivers.World` with prefill and decode workers, and what these answer."""

import json

from tests.dataplane.both_drivers import HEAD, World, run_fast_and_slow
from tests.dataplane.both_drivers import chat_request as chat_request

SERVER = "[server]\nlog_format = 'json'\n"
CONNECTORS = ["sglang", "nixl", "mooncake"]
NAMES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
PARAMS = b'{"remote_engine_id": "e", "remote_block_ids": [1, 2]}'
PREFILL = b'{"id": "p", "kv_transfer_params": %b}' % PARAMS


def answer(body=b"{}", status=b"200 OK", *, fields=b""):
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, fields, len(body)) + body


class PairWorld(World):
    """`prefill` and `decode` answer a leg each, the one that has waited longest."""

    connector = "sglang"
    ranks = 0

    def __init__(self, listeners, config="", *, short=True):
        fields = {
            name: {"role": role, "kv_connector": self.connector, "ranks": self.ranks}
            | ({"bootstrap_port": 9} if role == "prefill" and self.connector != "nixl" else {})
            for name, role in NAMES.items()
        }
        super().__init__(listeners, config, short=short, fields=fields)

    def ask(self, client, *pieces):
        """The ids of Mooncake's engines are known before."""
        for worker in self.fleet.workers if self.connector == "mooncake" else ():
            self.dataplane.services.engine_ids.keep(worker, {0: "engine", 1: "other"})
        super().ask(client, *pieces)

    def finish(self):
        """With legs that nobody answers, and the calls that end what engines still have."""
        super().finish()
        for secs in (6, 6, 400, 400, 6, 6, 6):
            self.wait(secs)

    def prefill(self, *plan):
        self._answer("prefill", plan or (answer(PREFILL),))

    def decode(self, *plan):
        self._answer("decode", plan or (answer(),))

    def _answer(self, role, plan):
        for name in NAMES:
            if NAMES[name] == role and any(
                end.name == name and end.asked and not end.plan for end in self.lines
            ):
                self.answer(*plan, by=name)
                return
        raise AssertionError(f"no {role} worker was asked")

    def answer(self, *plan, by=None):
        """Of whoever has waited longest; without plan, as is right there."""
        super().answer(*(plan or (answer(PREFILL),)), by=by)

    def serve(self, client, request=None):
        """One exchange, whole."""
        self.ask(client, request or chat_request())
        self.prefill()
        self.decode()

    def connect_client(self, *, slow=False, warm=0, like=None):
        client = super().connect_client(slow=slow)
        for _ in range(warm):
            self.serve(client, like)
        return client


def world_of(connector, ranks=0):
    return type(f"{connector}World", (PairWorld,), {"connector": connector, "ranks": ranks})


def run_pairs(listeners, script, connector="sglang", config="", *, ranks=0, **expected):
    """As `run_fast_and_slow`; `ranks`: of each worker."""
    new_world = world_of(connector, ranks)
    return run_fast_and_slow(listeners, script, config, new_world=new_world, **expected)


def finish(world):
    """Whatever follows: retries, aborts, the other leg."""
    for _ in range(12):
        world.more()
        world.answer()
    world.wait(2)
    for _ in range(6):
        world.answer()


def bodies(end):
    """Of the requests that came to a worker's connection."""
    found, at = [], 0
    while head := HEAD.search(end.came, at):
        length = next(
            int(line.partition(b":")[2])
            for line in head[2].split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        at = head.end() + length
        found.append(json.loads(end.came[head.end() : at] or b"{}"))
    return found
