from collections import Counter

import httpx
import trio

from tests.example_counts import thorough
from tests.promises.support.fleet_program import (
    PATIENCE_SECS,
    Program,
    chat,
    program,
    put,
    toml,
    workers,
)

CLIENTS = 32


class Storm:
    def __init__(self, running: Program) -> None:
        self.running = running
        self.stopped = False
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient(
            base_url=self.running.client.base_url,
            timeout=PATIENCE_SECS,
            trust_env=False,
            verify=False,
        ) as client:
            turn = number
            while not self.stopped:
                turn += 1
                await self._ask(client, stream=bool(turn % 2))

    async def _ask(self, client: httpx.AsyncClient, *, stream: bool) -> None:
        try:
            response = await client.post("/v1/chat/completions", json=chat(stream=stream))
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        whole = response.text.endswith("data: rest\n\ndata: [DONE]\n\n" if stream else '"}')
        if response.status_code != 200 or not whole:
            self.failures.append(f"{response.status_code} {response.text}")
        self.answers["stream" if stream else "unary"] += 1


async def test_no_request_of_32_clients_fails_during_many_reloads(tmp_path):
    file, reloads = tmp_path / "proxy.toml", 100 if thorough() else 40
    async with workers("stays", "b", "c") as (stays, b, c), trio.open_nursery() as nursery:
        fleets = ([stays, b], [b, stays, c], [stays], [c, stays])
        put(file, toml([stays]))
        async with program("--config", file) as running:
            await running.until_routable(stays)
            storm = Storm(running)
            for number in range(CLIENTS):
                nursery.start_soon(storm.client, number)
            outcomes: Counter[int] = Counter()
            for turn in range(reloads):
                broken = turn % 5 == 4
                put(file, "[server\n" if broken else toml(fleets[turn % 4]))
                outcomes[(await running.client.post("/reload")).status_code] += 1
                if turn % 7 == 0 and not broken:  # sometimes wait, so that new workers get requests
                    await running.until_routable(*fleets[turn % 4])
            storm.stopped = True
            while nursery.child_tasks:
                await trio.sleep(0.01)
        assert storm.failures == []
        assert outcomes == {200: reloads * 4 // 5, 422: reloads // 5}
        assert min(storm.answers["unary"], storm.answers["stream"]) >= reloads
        assert all(worker.requests for worker in (b, c))
