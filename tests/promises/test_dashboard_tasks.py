"""The three tasks of docs/dashboard.md, with as many presses as a person needs for them."""

import trio

from tests.promises.dashboard_page import address, dashboard, no_chromium, push, row, shows
from tests.promises.test_dashboard_work import ChatWorker, push_words

pytestmark = no_chromium
DRAIN = 2
SLOW_SECS = 0.15
# Two minutes are shown where there is no more: the axis of times has seconds.
BEGINS_WITH_THE_PROXY = """[...document.querySelectorAll("#charts .axis")].some(
    (it) => /^\\d\\d:\\d\\d:[03]0$/.test(it.textContent))"""
ROWS_OF_TILES = (
    "new Set([...document.querySelectorAll('#tiles dt')].map((it) => it.offsetTop)).size"
)
CUT_TIMES = """[...document.querySelectorAll("#charts svg")].flatMap((svg) =>
    [...svg.querySelectorAll(".axis")].filter((it) =>
        it.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1)).length"""
REQUESTS = 24  # of three workers, at least five each


class SlowWorker(ChatWorker):
    async def _answer(self, stream, body):
        await trio.sleep(SLOW_SECS)
        await super()._answer(stream, body)


async def chat(running, **headers):
    body = {"model": "m", "stream": True, "messages": []}
    answer = await running.client.post("/v1/chat/completions", json=body, headers=headers)
    return answer.status_code


async def test_a_slow_worker_is_found_one_is_added_another_drained_and_a_team_gets_a_key(
    page, tmp_path
):
    fleet = [ChatWorker("a"), SlowWorker("b"), ChatWorker("c")]
    new = ChatWorker("d")
    presses = 0

    async def press(*selector):
        nonlocal presses
        presses += 1
        await (page.click(*selector) if selector[0][0] == "#" else push_words(page, *selector))

    async with trio.open_nursery() as nursery:
        for worker in (*fleet, new):
            await nursery.start(worker.serve)
        async with dashboard(page, tmp_path, fleet) as running:
            async with trio.open_nursery() as clients:
                for _ in range(REQUESTS):
                    clients.start_soon(chat, running)
            slow = address(fleet[1])
            await shows(
                page, "#alerts", f"{slow} is slow", "first chunk after", "the others' after"
            )
            await page.until(BEGINS_WITH_THE_PROXY)
            await shows(page, "#tiles", "Tokens/s out", "Between tokens", "Policy")
            assert await page.tell(ROWS_OF_TILES) == 1
            assert await page.tell(CUT_TIMES) == 0
            assert presses == 0

            await press("#add")
            await page.type(new.url)
            await press("Add it")
            await shows(page, row(new), "takes requests")
            await push(page, fleet[1], DRAIN)
            await shows(page, row(fleet[1]), "drained")
            assert presses + 1 == 3

            await press("#make-key")
            await page.type("team-a")
            await press("#key-requests")
            await page.type("2")
            await press("#keying-make")
            await shows(page, "#new-key", "In force now")
            made = await page.text("#new-key pre")
            await press("#keying-no")
            key = {"authorization": f"Bearer {made}"}
            got = [await chat(running, **key) for _ in range(3)] + [await chat(running)]
            assert got == [200, 200, 429, 401]
            await shows(page, "#callers", "team-a", "at most 2 a minute", "18, 4")
            await shows(page, "#callers", "requests per minute 1", "without a right key")
            assert presses + 1 == 7
        nursery.cancel_scope.cancel()
