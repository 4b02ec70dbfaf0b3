from collections import Counter

import httpx
import trio

from tests.example_counts import thorough
from tests.promises.fleet_program import PATIENCE_SECS, Program, chat, program, put, toml, workers

CLIENTS = 32


class Storm:
    def __init__(self, running: Program) -> None:
        self.running = running
        self.over = False
        self.answers: Counter[str] = Counter()
        self.lost: list[str] = []

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient(
            base_url=self.running.client.base_url,
            timeout=PATIENCE_SECS,
            trust_env=False,
            verify=False,
        ) as client:
            turn = number
            while not self.over:
                turn += 1
                await self._ask(client, stream=bool(turn % 2))

    async def _ask(self, client: httpx.AsyncClient, *, stream: bool) -> None:
        try:
            answer = await client.post("/v1/chat/completions", json=chat(stream=stream))
        except httpx.HTTPError as error:
            self.lost.append(repr(error))
            return
        whole = answer.text.endswith("data: rest\n\ndata: [DONE]\n\n" if stream else '"}')
        if answer.status_code != 200 or not whole:
            self.lost.append(f"{answer.status_code} {answer.text}")
        self.answers["stream" if stream else "unary"] += 1


async def test_many_reloads_under_32_clients_cost_no_request(tmp_path):
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
                if turn % 7 == 0 and not broken:  # now and then the new workers are to be used, too
                    await running.until_routable(*fleets[turn % 4])
            storm.over = True
            while nursery.child_tasks:
                await trio.sleep(0.01)
        assert storm.lost == []
        assert outcomes == {200: reloads * 4 // 5, 422: reloads // 5}
        assert min(storm.answers["unary"], storm.answers["stream"]) >= reloads
        assert all(worker.requests for worker in (b, c))
