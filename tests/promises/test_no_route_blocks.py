"""Whatever workers do while a route asks them: no turn of the loop takes long, and all is answered.

Each route of the front is asked, beside workers that die, hang, lie or flood at that moment. A turn
is measured by the program's watchdog in the CPU time of its loop, so a busy machine is no fault.
"""

import json
import re
from functools import cache
from itertools import count
from urllib.parse import quote

import httpx
import pytest
import trio

from omni_proxy.admin_api.routes.broadcast_routes import CONFIGURED
from omni_proxy.admin_ops.results import MAX_ANSWER_VALUES
from omni_proxy.wire.bounded_json import MAX_VALUES
from tests.admin_api.api_fixture import A, build_api, entry
from tests.example_counts import thorough
from tests.promises.fakes import Call, counted
from tests.promises.fleet_program import PATIENCE_SECS, program

MOST_TURN_MS = 100
ASKED_SECS = 30.0
ASKED_HANGING_SECS = 4.0  # who waits for a worker that hangs is left then
AT_ONCE = 6
HANGING_AT_ONCE = 24  # such calls only wait
MIB = 1024 * 1024
READ = re.compile(r"models|server_info|get_model_info|loads")  # the rest is an administrator's
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
REQUESTS = {  # what a route needs beside an empty object
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


MEMBERS = 3 if thorough() else 2  # of the fleet, from the start on


class Fleet:
    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self._spare = count()

    def spare(self) -> str:
        """One that is no member, another each time."""
        return self.urls[MEMBERS + next(self._spare) % (len(self.urls) - MEMBERS)]


class Bad:
    """A worker whose probes are good. One that dies breaks off each call; with `once` it never
    comes back behind its first probe."""

    def __init__(self, mode: str, *, once: bool) -> None:
        self.mode = mode
        self._once = once
        self.url = ""
        self._gone = False

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)

    async def _connection(self, stream: trio.SocketStream) -> None:
        call = Call(stream)
        try:
            while not self._gone and await call.next_request():
                if call.line.startswith("GET /health "):
                    await call.send(counted(b'{"status": "ok"}'))
                    self._gone = self._once and self.mode == "dies"
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
    """As much as is read of a worker, of what takes longest."""
    if line.startswith("GET /metrics"):
        return b"f" + b" " * (7 * MIB) + b"# TYPE" + b" " * (MIB // 2)
    each = b'{"x":1},' if "model" in line else b"{},"
    many = each * (3 * MIB // 2 // len(each))
    return b'{"success":true,"data":[%b{}],"loads":[%b{}]}' % (many, many)


@cache
def fill(line: str) -> bytes:
    """As much as is taken, within all bounds."""
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
    reported = b'{"success":true,"data":[%b],"loads":[%b],%b,"x":[%b1]}'
    return reported % (cards, ranks, fields, more)


def lie(line: str) -> bytes:
    if line.startswith("GET /metrics"):
        return b"# TYPE\nx{ y z\n"
    wrong = {"x": float("nan"), "loads": {"a": 1}, "data": [1, None, {"id": []}], "tp_size": "many"}
    return json.dumps({**wrong, "success": "perhaps", "weight_version": [1]}).encode()


def routes() -> list[tuple[str, str]]:
    """All of the app's, so that a new one is asked too."""
    rules = build_api(entry(A)).app.url_map.iter_rules()
    rules = [rule for rule in rules if rule.rule != CONFIGURED]  # those are tried as what they are
    return [(method, rule.rule) for rule in rules for method in rule.methods - {"HEAD", "OPTIONS"}]


def place(method: str, rule: str, fleet: Fleet) -> str:
    """Raises KeyError for a parameter that nobody has thought of here."""
    worker = fleet.spare() if method == "DELETE" else fleet.urls[0]
    of = {"name": quote(worker, safe=""), "path": ENGINE, "model": "m"}
    of |= {"reservation_id": "x", "caller": "x"}
    path = re.sub(r"<path:(\w+)>", lambda found: of[found[1]], rule)
    return f"{path}?selector=model!%3Dx" if rule.startswith("/v1/rl/engine") else path


async def ask(
    client: httpx.AsyncClient, method: str, rule: str, fleet: Fleet, asked_secs: float
) -> int | None:
    """The status; None where it was left."""
    how = REQUESTS.get(f"{method} {rule}", lambda _: {} if method == "GET" else {"json": {}})(fleet)
    with trio.move_on_after(asked_secs):
        async with client.stream(method, place(method, rule, fleet), **how) as answer:
            async for _ in answer.aiter_raw():
                pass
            return answer.status_code
    return None


def test_each_route_can_be_called():
    known = {f"{method} {rule}" for method, rule in routes()}
    assert REQUESTS.keys() <= known
    fleet = Fleet(["http://a"] * 4)
    assert all(place(method, rule, fleet) for method, rule in routes())


@pytest.mark.parametrize("mode", ["dies", "hangs", "lies", "floods", "fills"])
async def test_no_route_blocks_the_others_whatever_its_workers_do(tmp_path, nursery, mode):
    bad = [Bad(mode, once=number >= MEMBERS) for number in range(8)]
    for each in bad:
        await nursery.start(each.serve)
    fleet = Fleet([each.url for each in bad])
    file = tmp_path / "proxy.toml"
    file.write_text(
        CONFIG + "".join(f'[[workers]]\nurl = "{url}"\n' for url in fleet.urls[:MEMBERS])
    )
    async with program("--config", file) as running:
        await running.until_routable(*bad[:MEMBERS])
        hangs = mode == "hangs"
        found = await all_asked(
            running.client,
            fleet,
            HANGING_AT_ONCE if hangs else AT_ONCE,
            ASKED_HANGING_SECS if hangs else ASKED_SECS,
        )
        assert [route for route, status in found.items() if status == 500] == []
        if not hangs:
            assert [route for route, status in found.items() if status is None] == []
        watched = (await running.get_json("/status"))["watchdog"]
        assert watched["stalls"] == 0
        assert watched["longest_turn_ms"] < MOST_TURN_MS, f"{watched}\n{found}"


async def all_asked(
    client: httpx.AsyncClient, fleet: Fleet, at_once: int, asked_secs: float
) -> dict[tuple[str, str], int | None]:
    """What each route has answered; meanwhile the program answers others."""
    found = {}
    places = trio.CapacityLimiter(at_once)

    async def one(method: str, rule: str) -> None:
        async with places:
            found[method, rule] = await ask(client, method, rule, fleet, asked_secs)

    async def ask_others() -> None:
        while True:
            assert (await client.get("/live")).status_code == 200
            await trio.sleep(0.05)

    with trio.fail_after(PATIENCE_SECS):
        async with trio.open_nursery() as others:
            others.start_soon(ask_others)
            for phase in ({"GET"}, {"POST", "PUT", "PATCH"}, {"DELETE"}):
                async with trio.open_nursery() as asking:
                    for method, rule in routes():
                        if method in phase:
                            asking.start_soon(one, method, rule)
            others.cancel_scope.cancel()
    return found
