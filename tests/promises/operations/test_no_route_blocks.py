"""No admin route blocks the event loop or stays unanswered, whatever the workers do.

Every route is requested while its workers break connections, hang, or send wrong or huge replies.
The program's watchdog measures each iteration in CPU time, so a busy machine is not a failure.
"""

import json
import re
from functools import cache
from itertools import count
from urllib.parse import quote

import httpx
import pytest
import trio

from omni_proxy.admin_api.routes.operations.weight_routes import CONFIGURED
from omni_proxy.admin_ops.results import MAX_ANSWER_VALUES
from omni_proxy.wire.bounded_json import MAX_VALUES
from tests.admin_api.api_fixture import A, build_api, entry
from tests.example_counts import thorough
from tests.promises.support.fakes import Call, counted
from tests.promises.support.fleet_program import PATIENCE_SECS, program

MAX_TURN_MS = 100
REQUEST_SECS = 30.0
HANGING_REQUEST_SECS = 4.0  # requests that wait for a hanging worker are cancelled then
AT_ONCE = 6
HANGING_AT_ONCE = 24  # these requests only wait
MIB = 1024 * 1024
READ = re.compile(
    r"models|server_info|get_model_info|loads"
)  # other calls to workers are admin calls
CONFIG = """
[server]
port = 0
state_file = "off"
drain_timeout_secs = 1
[admin]
lock_timeout_secs = 1
worker_timeout_secs = 1
[health]
interval_secs = 0.2
timeout_secs = 2
success_threshold = 1
failure_threshold = 3
on_threshold = "dead"
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
REQUESTS = {  # what a route needs besides an empty object
    "POST /workers": lambda fleet: {"json": {"url": fleet.spare()}},
    "POST /explain": lambda fleet: {"json": CHAT},
    "POST /add_worker": lambda fleet: {"params": {"url": fleet.spare(), "timeout_secs": 2}},
    "POST /remove_worker": lambda fleet: {"params": {"url": fleet.spare()}},
    "GET /feed": lambda fleet: {"params": {"once": "true"}},
    "POST /update_weights_from_disk": lambda fleet: {"json": {"model_path": "/there"}},
    "POST /update_weight_version": lambda fleet: {"json": {"new_version": "2"}},
    "POST /get_weights_by_name": lambda fleet: {"json": {"name": "w"}},
}
ENGINE = "server_info"  # the path of routes that name one of an engine


MEMBERS = 3 if thorough() else 2  # workers that are configured from the start


class Fleet:
    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self._spare = count()

    def spare(self) -> str:
        """Returns the URL of a worker outside the fleet, a different one each time."""
        return self.urls[MEMBERS + next(self._spare) % (len(self.urls) - MEMBERS)]


class Bad:
    """A worker that passes its health checks and misbehaves otherwise. In mode "dies" it resets
    each connection; with `once` it also stops serving after the first health check."""

    def __init__(self, mode: str, *, once: bool) -> None:
        self.mode = mode
        self._once = once
        self.url = ""
        self._dead = False

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)

    async def _connection(self, stream: trio.SocketStream) -> None:
        call = Call(stream)
        try:
            while not self._dead and await call.next_request():
                if call.line.startswith("GET /health "):
                    await call.send(counted(b'{"status": "ok"}'))
                    self._dead = self._once and self.mode == "dies"
                elif self.mode == "dies":
                    break
                else:
                    await self._answer(call)
            call.reset()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _answer(self, call: Call) -> None:
        if self.mode == "hangs":
            await call.until_left()
        else:
            body = {"floods": flood, "fills": fill, "lies": lie}[self.mode](call.line)
            await call.send(counted(body, "content-type: application/json"))


@cache
def flood(line: str) -> bytes:
    """Returns the most expensive body to parse, as large as the proxy reads."""
    if line.startswith("GET /metrics"):
        return b"f" + b" " * (7 * MIB) + b"# TYPE" + b" " * (MIB // 2)
    item = b'{"x":1},' if "model" in line else b"{},"
    items = item * (3 * MIB // 2 // len(item))
    return b'{"success":true,"data":[%b{}],"loads":[%b{}]}' % (items, items)


@cache
def fill(line: str) -> bytes:
    """Returns a body that the proxy accepts, at its limits."""
    if line.startswith("GET /metrics"):
        families = (
            b"# TYPE a%d gauge\n" % number + b"a%d 1\n" % number * 20 for number in range(999)
        )
        return b"".join(families)
    most = MAX_VALUES if READ.search(line) else MAX_ANSWER_VALUES
    cards = b",".join(b'{"id":"m%d"}' % number for number in range(1000))
    ranks = b",".join([b'{"dp_rank":1}'] * 1000)
    fields = b",".join(b'"f%d":%d' % (number, number) for number in range(900))
    more = b"1," * (most - 10_000)
    template = b'{"success":true,"data":[%b],"loads":[%b],%b,"x":[%b1]}'
    return template % (cards, ranks, fields, more)


def lie(line: str) -> bytes:
    if line.startswith("GET /metrics"):
        return b"# TYPE\nx{ y z\n"
    wrong = {"x": float("nan"), "loads": {"a": 1}, "data": [1, None, {"id": []}], "tp_size": "many"}
    return json.dumps({**wrong, "success": "perhaps", "weight_version": [1]}).encode()


def routes() -> list[tuple[str, str]]:
    """Returns all routes of the app, so that new ones are included."""
    rules = build_api(entry(A)).app.url_map.iter_rules()
    rules = [rule for rule in rules if rule.rule != CONFIGURED]  # a catch-all for configured routes
    return [(method, rule.rule) for rule in rules for method in rule.methods - {"HEAD", "OPTIONS"}]


def path_of(method: str, rule: str, fleet: Fleet) -> str:
    """Returns the path of a request. Raises KeyError for a parameter unknown to this test."""
    worker = fleet.spare() if method == "DELETE" else fleet.urls[0]
    values = {"name": quote(worker, safe=""), "path": ENGINE, "model": "m"}
    values |= {"reservation_id": "x", "caller": "x"}
    path = re.sub(r"<path:(\w+)>", lambda match: values[match[1]], rule)
    return f"{path}?selector=model!%3Dx" if rule.startswith("/v1/rl/engine") else path


async def status_of(
    client: httpx.AsyncClient, method: str, rule: str, fleet: Fleet, timeout_secs: float
) -> int | None:
    """Returns the status of the response, or None after a timeout."""
    arguments = REQUESTS.get(f"{method} {rule}", lambda _: {} if method == "GET" else {"json": {}})(
        fleet
    )
    with trio.move_on_after(timeout_secs):
        async with client.stream(method, path_of(method, rule, fleet), **arguments) as response:
            async for _ in response.aiter_raw():
                pass
            return response.status_code
    return None


def test_every_route_has_a_path_and_a_request():
    names = {f"{method} {rule}" for method, rule in routes()}
    assert REQUESTS.keys() <= names
    fleet = Fleet(["http://a"] * 4)
    assert all(path_of(method, rule, fleet) for method, rule in routes())


@pytest.mark.parametrize("mode", ["dies", "hangs", "lies", "floods", "fills"])
async def test_no_route_blocks_the_others_whatever_its_workers_do(tmp_path, nursery, mode):
    bad = [Bad(mode, once=number >= MEMBERS) for number in range(8)]
    for worker in bad:
        await nursery.start(worker.serve)
    fleet = Fleet([worker.url for worker in bad])
    file = tmp_path / "proxy.toml"
    file.write_text(
        CONFIG + "".join(f'[[workers]]\nurl = "{url}"\n' for url in fleet.urls[:MEMBERS])
    )
    async with program("--config", file) as running:
        await running.until_routable(*bad[:MEMBERS])
        hangs = mode == "hangs"
        statuses = await statuses_of_all(
            running.client,
            fleet,
            HANGING_AT_ONCE if hangs else AT_ONCE,
            HANGING_REQUEST_SECS if hangs else REQUEST_SECS,
        )
        assert [route for route, status in statuses.items() if status == 500] == []
        if not hangs:
            assert [route for route, status in statuses.items() if status is None] == []
        watchdog = (await running.get_json("/status"))["watchdog"]
        assert watchdog["stalls"] == 0
        assert watchdog["longest_turn_ms"] < MAX_TURN_MS, f"{watchdog}\n{statuses}"


async def statuses_of_all(
    client: httpx.AsyncClient, fleet: Fleet, at_once: int, timeout_secs: float
) -> dict[tuple[str, str], int | None]:
    """Requests every route and returns the statuses; the program stays responsive meanwhile."""
    statuses = {}
    limiter = trio.CapacityLimiter(at_once)

    async def request_route(method: str, rule: str) -> None:
        async with limiter:
            statuses[method, rule] = await status_of(client, method, rule, fleet, timeout_secs)

    async def check_liveness() -> None:
        while True:
            assert (await client.get("/live")).status_code == 200
            await trio.sleep(0.05)

    with trio.fail_after(PATIENCE_SECS):
        async with trio.open_nursery() as background:
            background.start_soon(check_liveness)
            for phase in ({"GET"}, {"POST", "PUT", "PATCH"}, {"DELETE"}):
                async with trio.open_nursery() as requests:
                    for method, rule in routes():
                        if method in phase:
                            requests.start_soon(request_route, method, rule)
            background.cancel_scope.cancel()
    return statuses
