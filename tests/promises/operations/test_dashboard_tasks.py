"""The three tasks of docs/dashboard.md, each within the number of clicks that the page promises."""

import trio

from tests.promises.operations.test_dashboard_work import ChatWorker, push_words
from tests.promises.support.dashboard_page import address, dashboard, no_chromium, push, row, shows

pytestmark = no_chromium
DRAIN = 2
SLOW_SECS = 0.15
# A proxy that just started has a chart of two minutes: the labels of its axis have seconds.
AXIS_HAS_SECONDS = """[...document.querySelectorAll("#charts .axis")].some(
    (it) => /^\\d\\d:\\d\\d:[03]0$/.test(it.textContent))"""
TILE_ROWS = "new Set([...document.querySelectorAll('#tiles dt')].map((it) => it.offsetTop)).size"
CUT_LABELS = """[...document.querySelectorAll("#charts svg")].flatMap((svg) =>
    [...svg.querySelectorAll(".axis")].filter((it) =>
        it.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1)).length"""
REQUESTS = 24  # so that each of three workers gets at least five


class SlowWorker(ChatWorker):
    async def _answer(self, stream, body):
        await trio.sleep(SLOW_SECS)
        await super()._answer(stream, body)


async def chat(running, **headers):
    body = {"model": "m", "stream": True, "messages": []}
    answer = await running.client.post("/v1/chat/completions", json=body, headers=headers)
    return answer.status_code


async def test_the_documented_tasks_take_the_promised_number_of_clicks(page, tmp_path):
    fleet = [ChatWorker("a"), SlowWorker("b"), ChatWorker("c")]
    new = ChatWorker("d")
    clicks = 0

    async def press(*selector):
        nonlocal clicks
        clicks += 1
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
            await page.until(AXIS_HAS_SECONDS)
            await shows(page, "#tiles", "Tokens/s out", "Between tokens", "Policy")
            assert await page.evaluate(TILE_ROWS) == 1
            assert await page.evaluate(CUT_LABELS) == 0
            assert clicks == 0

            await press("#add-worker")
            await page.type(new.url)
            await press("#worker-form .primary")
            await shows(page, row(new), "takes requests")
            await push(page, fleet[1], DRAIN)
            await shows(page, row(fleet[1]), "drained")
            assert clicks + 1 == 3

            await press("#add-caller")
            await page.type("team-a")
            await press("#caller-requests")
            await page.type("2")
            await press("#caller-submit")
            await shows(page, "#new-key", "Active now")
            new_key = await page.text("#new-key pre")
            await press("#caller-cancel")
            headers = {"authorization": f"Bearer {new_key}"}
            statuses = [await chat(running, **headers) for _ in range(3)] + [await chat(running)]
            assert statuses == [200, 200, 429, 401]
            await shows(page, "#callers", "team-a", "limit 2 per minute", "18, 4")
            await shows(page, "#callers", "requests per minute 1", "without a valid key")
            assert clicks + 1 == 7
        nursery.cancel_scope.cancel()
