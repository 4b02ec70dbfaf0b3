"""A `both_drivers.World` with prefill and decode workers, and their responses."""

import json

from tests.dataplane.both_drivers import HEAD, World, run_fast_and_slow
from tests.dataplane.both_drivers import chat_request as chat_request

SERVER = "[server]\nlog_format = 'json'\n"
CONNECTORS = ["sglang", "nixl", "mooncake"]
NAMES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
PARAMS = b'{"remote_engine_id": "e", "remote_block_ids": [1, 2]}'
PREFILL = b'{"id": "p", "kv_transfer_params": %b}' % PARAMS


def response_with(body=b"{}", status=b"200 OK", *, fields=b""):
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, fields, len(body)) + body


class PairWorld(World):
    """`prefill_responds` and `decode_responds` answer the first open leg of their role."""

    connector = "sglang"
    ranks = 0

    def __init__(self, listeners, config="", *, use_fast_path=True):
        fields = {
            name: {"role": role, "kv_connector": self.connector, "ranks": self.ranks}
            | ({"bootstrap_port": 9} if role == "prefill" and self.connector != "nixl" else {})
            for name, role in NAMES.items()
        }
        super().__init__(listeners, config, use_fast_path=use_fast_path, fields=fields)

    def client_sends(self, client, *pieces):
        # The engine ids of Mooncake's workers have to be known in advance.
        for worker in self.fleet.workers if self.connector == "mooncake" else ():
            self.dataplane.services.engine_ids.keep(worker, {0: "engine", 1: "other"})
        super().client_sends(client, *pieces)

    def finish(self):
        """Let unanswered legs time out, and the abort requests to their engines end."""
        super().finish()
        for secs in (6, 6, 400, 400, 6, 6, 6):
            self.wait(secs)

    def prefill_responds(self, *pieces):
        self._role_responds("prefill", pieces or (response_with(PREFILL),))

    def decode_responds(self, *pieces):
        self._role_responds("decode", pieces or (response_with(),))

    def _role_responds(self, role, pieces):
        for name in NAMES:
            if NAMES[name] == role and any(
                connection.name == name and connection.unanswered and not connection.to_send
                for connection in self.worker_connections
            ):
                self.worker_responds(*pieces, by=name)
                return
        raise AssertionError(f"no {role} worker has an open request")

    def worker_responds(self, *pieces, by=None):
        """By default a response that is valid for both legs."""
        super().worker_responds(*(pieces or (response_with(PREFILL),)), by=by)

    def serve(self, client, request=None):
        """One complete exchange."""
        self.client_sends(client, request or chat_request())
        self.prefill_responds()
        self.decode_responds()

    def connect_client(self, *, slow=False, warm=0, warm_request=None):
        client = super().connect_client(slow=slow)
        for _ in range(warm):
            self.serve(client, warm_request)
        return client


def world_of(connector, ranks=0):
    return type(f"{connector}World", (PairWorld,), {"connector": connector, "ranks": ranks})


def run_pairs(listeners, script, connector="sglang", config="", *, ranks=0, **expected):
    """`run_fast_and_slow` in a `PairWorld`; `ranks` is the number of ranks of each worker."""
    new_world = world_of(connector, ranks)
    return run_fast_and_slow(listeners, script, config, new_world=new_world, **expected)


def finish(world):
    """Answer whatever follows: retries, aborts, the other leg."""
    for _ in range(12):
        world.worker_continues()
        world.worker_responds()
    world.wait(2)
    for _ in range(6):
        world.worker_responds()


def bodies(connection):
    """The parsed bodies of the requests on a worker's connection."""
    parsed, at = [], 0
    while head := HEAD.search(connection.received, at):
        length = next(
            int(line.partition(b":")[2])
            for line in head[2].split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        at = head.end() + length
        parsed.append(json.loads(connection.received[head.end() : at] or b"{}"))
    return parsed
