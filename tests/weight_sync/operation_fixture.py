"""A desk over two workers that answer from a table, without sockets."""

from __future__ import annotations

import json

import httpx
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.admin_ops.routes import BY_PATH
from omni_proxy.weight_sync.protocol.journal import Journal, decode
from omni_proxy.weight_sync.worker_calls import AdminCall
from tests.admin_api.engines_at_hand import Engines
from tests.admin_api.house import A, B, build_house, entry

UPDATE, PAUSE = "/update_weights_from_disk", "/pause_generation"
LOST = httpx.ReadError("gone")


class Gated(Engines):
    """Whoever has no row in `says` does well; `gates[(url, path)]` keeps an answer back."""

    def __init__(self):
        super().__init__()
        self.gates, self.labels, self.sums = {}, {A: "v1", B: "v1"}, {A: "s", B: "s"}
        self.came, self.whole = {}, {}

    def shut(self, path, *urls):
        for url in urls or (A, B):
            self.gates[url, path] = trio.Event()
            self.came[url, path] = trio.Event()

    def open(self, path, *urls):
        for url in urls or (A, B):
            self.gates[url, path].set()

    def paths(self, url=A):
        port = int(url.rpartition(":")[2])
        return [r.url.path for r in self.asked if r.url.port == port]

    async def answer(self, request):
        url = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        path = request.url.path
        if (url, path) not in self.says:
            self.tell(url, path, self.well(url, path))
            found = await self.keep(request, url, path)
            del self.says[url, path]
            return found
        return await self.keep(request, url, path)

    async def keep(self, request, url, path):
        if (url, path) in self.came:
            self.came[url, path].set()
            answer = await super().answer(request)
            await self.gates[url, path].wait()
            return answer
        return await super().answer(request)

    def well(self, url, path):
        if path == "/model_info":
            return {"success": True, "weight_version": self.labels[url]}
        if path == "/weights_checker":
            data = {"per_gpu_checksum": self.sums[url], "full_checksum": self.whole.get(url)}
            return {"results": [{"stage": "t", "data": data}]}
        return {"success": True}


def call(path=UPDATE, body=None, **fields):
    raw = json.dumps({} if body is None else body).encode()
    return AdminCall(BY_PATH[path], "POST", path, raw, **fields)


def house_with(folder, **tables):
    house = build_house(entry(A), entry(B), folder=folder, **tables)
    house.healthy(A, B)
    return house


def held(house):
    return [sorted(worker.cordon_reasons) for worker in house.fleet.workers]


async def ask(house, *wanted):
    """The answers to some calls, asked for in their order."""
    answers = [None] * len(wanted)

    async def one(at):
        answers[at] = await house.desk.submit(wanted[at])

    async with trio.open_nursery() as nursery:
        for at in range(len(wanted)):
            nursery.start_soon(one, at)
            await wait_all_tasks_blocked()
    return answers


async def started(engines, nursery, house, wanted, *urls):
    """Ask in the background, and return once these workers have been asked."""
    engines.shut(wanted.route.path, *urls)
    nursery.start_soon(house.desk.submit, wanted)
    for url in urls or (A, B):
        await engines.came[url, wanted.route.path].wait()


def journal(folder):
    path = folder / "journal.json"
    return decode(path.read_bytes()) if path.exists() else Journal()
