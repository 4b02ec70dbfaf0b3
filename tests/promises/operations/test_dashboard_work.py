"""Operators' work on the dashboard of the real program, in a real browser."""

import hashlib
import json
from contextlib import asynccontextmanager

import trio

from tests.promises.support.dashboard_page import (
    address,
    dashboard,
    no_chromium,
    push,
    row,
    shows,
)
from tests.promises.support.fleet_program import Worker, record

pytestmark = no_chromium
REMOVE = 4  # the position of the button in the row of a worker


class ChatWorker(Worker):
    """Streams a chat response of two tokens; if `broken`, closes the connection instead."""

    broken = False

    async def _answer(self, stream, body):
        if self.broken:
            raise trio.BrokenResourceError
        if not body.get("stream"):
            await super()._answer(stream, body)
            return
        chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("Hello, ", "operator")]
        chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        await stream.send_all(head + b"transfer-encoding: chunked\r\n\r\n")
        for line in lines:
            await stream.send_all(b"%x\r\n%b\r\n" % (len(line), line.encode()))
        await stream.send_all(b"0\r\n\r\n")


@asynccontextmanager
async def chat_workers(*names):
    fleet = [ChatWorker(name) for name in names]
    async with trio.open_nursery() as nursery:
        for worker in fleet:
            await nursery.start(worker.serve)
        yield fleet
        nursery.cancel_scope.cancel()


def button(words):
    """A script that marks the visible button with these words for a click."""
    return f"""(() => {{
        for (const it of document.querySelectorAll("[data-wanted]")) delete it.dataset.wanted;
        const found = [...document.querySelectorAll("button")].find((button) =>
            button.innerText.startsWith({json.dumps(words)}) && button.checkVisibility());
        if (found) found.dataset.wanted = "";
        return Boolean(found);
    }})()"""


async def push_words(page, words):
    await page.until(button(words))
    await page.click("[data-wanted]")


async def fill(page, selector, text):
    await page.click(selector)
    await page.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
    await page.type(text)


async def test_traffic_is_charted_and_a_request_shows_its_attempts(page, tmp_path):
    async with chat_workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        one, two = fleet
        one.broken = True
        for _ in range(2):
            await running.ask(model="some-model", stream=True)
        await shows(page, "#request-rows", "2 attempts")
        retried = "[...document.querySelectorAll('#request-rows tr')].find((it) => /2 att/.test(it.innerText))"
        await page.evaluate(f"{retried}.querySelector('button').click()")
        texts = (address(one), address(two), "Why this worker?", "round_robin", "had failed")
        await shows(
            page, ".request-details", *texts, "waiting for the response head", "omni-proxy trace"
        )
        parts = ("Candidates of the first attempt", "eligible", "picked")
        await shows(page, ".candidates", *parts, "in flight")
        await push_words(page, "Where would this request go now?")
        await shows(page, "#explain-result", "It would go to")
        await push_words(page, "Close and resume")
        await page.until("!document.querySelector('.request-details')")

        seen = "chartData?.series.requests_per_sec.some((value) => value > 0)"
        await page.until("points.some((point) => point.requests > 0)")
        await page.evaluate("selectCharts(3600, '')")  # fetches the history at once
        await page.until(seen)
        label = "document.querySelector('#charts svg').getAttribute('aria-label')"
        assert "Requests per second of the fleet over the last 1 h; now all" in await page.evaluate(
            label
        )
        await page.evaluate("document.activeElement.blur()")
        await page.press("1")
        await page.until("chartData?.secs === 900")
        await page.evaluate(f"document.querySelector({json.dumps(row(two) + ' .name')}).click()")
        await shows(page, "#worker-rows", two.url, "Requests since added")
        await push_words(page, "Show charts")
        await page.until(f"chartData?.worker === {json.dumps(two.url)} && Boolean(fleetData)")
        assert f"of {address(two)} over the last 15 min" in await page.evaluate(label)
        await page.evaluate(
            "chartData.series.requests_per_sec.fill(0).fill(0.4, 0, 2); renderCharts()"
        )
        assert await page.text("#traffic-summary") == "4 requests, 0 errors in 15 min"
        assert "tokens are not counted" in await page.text("#charts")
        await page.click("#traffic summary")
        await shows(page, "#chart-values", "Time to first token, p95", "Max")


async def test_workers_are_changed_removed_added_and_brought_back(page, tmp_path):
    async with chat_workers("one", "two", "three") as fleet:
        one, two, three = fleet
        async with dashboard(page, tmp_path, [one, two]) as running:

            async def record_of(worker):
                return record(await running.get_json("/workers"), worker)

            await shows(page, row(two), "takes requests")
            await page.evaluate(
                f"document.querySelector({json.dumps(row(two) + ' .name')}).click()"
            )
            await page.until("document.querySelector('.worker-details') !== null")
            await fill(page, ".worker-details label:nth-of-type(1) input", "3")
            await fill(page, ".worker-details label:nth-of-type(2) input", "7")
            await push_words(page, "Save")
            await shows(page, "#notification", "has weight 3 and at most 7 in flight")
            changed = await record_of(two)
            assert (changed["weight"], changed["max_inflight"]) == (3, 7)

            await push(page, two, REMOVE)
            await page.click("#confirm-ok")
            await push_words(page, "Undo")
            await shows(page, "#notification", "was added again")
            restored = await record_of(two)
            assert (restored["weight"], restored["max_inflight"], restored["disabled"]) == (
                3,
                7,
                False,
            )

            await page.evaluate("document.activeElement.blur()")
            await page.press("a")
            await page.type(address(three))
            await page.press("Enter")
            await shows(page, row(three), "takes requests")
            assert (await record_of(three))["origin"] == "api"

            headers = {"User-Agent": "deploy-bot"}
            path = "/workers/" + (await record_of(one))["id"].replace("%", "%25")
            await running.client.post(f"{path}/drain", json={}, headers=headers)
            await shows(
                page,
                "#alerts",
                f"{address(one)} is out of rotation",
                "by deploy-bot from 127.0.0.1",
            )
            await push_words(page, "Enable")
            await shows(page, "#alerts", "No problems")

            await running.client.post("/pause_generation", json={}, headers=headers)
            await shows(page, "#alerts", "PAUSED: 3 of 3 workers", "by deploy-bot")
            await push_words(page, "Continue")
            await shows(page, "#confirm", "paused by deploy-bot")
            await page.click("#confirm-ok")
            await shows(page, "#alerts", "No problems")


async def test_a_caller_gets_a_key_and_its_chat_is_counted(page, tmp_path):
    async with chat_workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, "#no-callers", "any client that can reach this port")
        await page.click("#add-caller")
        await page.type("team-a")
        await page.click("#caller-inflight")
        await page.type("4")
        await fill(page, "#caller-models", "m, n")
        await fill(page, "#caller-priority", "-2")
        await shows(page, "#first-key-warning", "requests without a valid key are refused")
        await page.press("Enter")
        await shows(page, "#new-key", "shown once", "Active now")
        assert (
            await page.evaluate("document.querySelector('#caller-dialog .primary').innerText")
            == "Close"
        )
        key, entry = await page.evaluate(
            "[...document.querySelectorAll('#new-key pre')].map((it) => it.textContent)"
        )
        digest = hashlib.sha256(key.encode()).hexdigest()
        limits = ("max_inflight = 4", 'models = ["m", "n"]', "priority = -2")
        assert all(words in entry for words in (f'"{digest}"', "[[keys]]", *limits))
        await page.click("#caller-cancel")
        assert key not in await page.evaluate("document.documentElement.outerHTML")
        await shows(page, "#callers", "team-a", "0 of 4", "models m, n")

        await fill(page, "#chat-model", "m")
        await fill(page, "#chat-input", "Hi")
        await page.press("Enter")
        await shows(page, "#chat-messages", "401", "Enter an API key above")
        await shows(page, "#alerts", "1 request without a valid key in the last minute")
        await shows(page, "#callers", "without a valid key")
        await page.click("#chat-key")
        await page.type(key)
        await fill(page, "#chat-input", "Hi again")
        await page.press("Enter")
        await shows(page, "#chat-messages", "Hello, operator")
        await shows(page, "#chat-stats", address(fleet[0]), "First token", "Tokens", "2")
        await shows(page, "#callers", "9, 2")
        stored = "[localStorage.length, sessionStorage.length, document.cookie]"
        assert await page.evaluate(stored) == [0, 0, ""]
        assert [url for url in page.asked if key in url] == []

        file = tmp_path / "proxy.toml"
        assert digest not in file.read_text()
        assert digest in (tmp_path / "proxy.state.toml").read_text()  # so a restart keeps it
        await page.click("#caller-rows button")
        await shows(page, "#confirm", "model routes are then open to everyone")
        await page.click("#confirm-ok")
        await shows(page, "#no-callers", "any client that can reach this port")


SLOW_WORKERS = """(() => {
    stopFeed();
    const one = snapshot.fleet[0];
    const of = (at, times, fields) => ({
        ...one, id: `w${at}`, url: `http://10.0.0.${at}:1`, display_id: null,
        slow: times ? {times, text: `7 ms between two chunks, of ${at}`} : null, ...fields});
    const drained = {routable: false, disabled: true, drain: {state: "drained"}, why: "drained"};
    snapshot.fleet = [of(1), of(2), of(3, 4), of(4, 3), of(5, 9, drained), of(6)];
    render();
})()"""


async def test_slow_workers_have_alerts_and_are_found_by_a_search(page, tmp_path):
    async with chat_workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        await page.evaluate(SLOW_WORKERS)
        alerts = await page.text("#alerts")
        assert [at for at in range(1, 7) if f"10.0.0.{at}:1 is slow" in alerts] == [3, 4]
        assert "10.0.0.5:1 is out of rotation" in alerts
        assert "10.0.0.3:1 is slow: 7 ms between two chunks, of 3" in alerts
        drained = "document.querySelector('[data-worker=w5] .badge.slow')"
        colours = f"(({{color, backgroundColor}}) => [color, backgroundColor])(getComputedStyle({drained}))"
        colour, background = await page.evaluate(colours)
        assert colour != background
        await page.press("/")
        await page.type("slow")
        found = await page.evaluate(
            "[...document.querySelectorAll('#worker-rows > tr')].map((it) => it.dataset.worker)"
        )
        assert found == ["w3", "w4", "w5"]


async def test_a_warning_disappears_when_its_worker_is_removed(page, tmp_path):
    async with chat_workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        hidden = await page.evaluate("""(() => {
            stopFeed();
            notify("was added; not checked yet", "warning");
            notificationWorker = {id: snapshot.fleet[0].id, seen: false};
            render();
            const before = $("notification").hidden;
            snapshot.fleet = [];
            render();
            return [before, $("notification").hidden];
        })()""")
        assert hidden == [False, True]


MANY = """(() => {
    stopFeed();  // the feed: the rows below are the test's
    const one = snapshot.fleet[0];
    snapshot.fleet = Array.from({length: 200}, (_, at) => ({
        ...one, id: `w${at}`, url: `http://10.0.0.${at}:1`, display_id: `10.0.0.${at}:1`, in_flight: at,
        model: at % 2 ? "odd" : "even", why: null,
        ...at === 150 ? {health: "dead", routable: false, why: "dead: for a test"} : {},
    }));
    render();
})()"""
ROWS = "[...document.querySelectorAll('#worker-rows > tr')].map((it) => it.innerText)"


async def test_two_hundred_workers_are_searched_sorted_and_grouped(page, tmp_path):
    async with chat_workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        await page.evaluate(MANY)
        shown = await page.evaluate(ROWS)
        assert (len(shown), "10.0.0.150:1" in shown[0]) == (15, True)
        assert "15 of 200 shown" in await page.text("#fleet-summary")

        await page.press("/")
        await page.type("10.0.0.77")
        assert await page.evaluate("document.activeElement.id") == "worker-search"
        (found,) = await page.evaluate(ROWS)
        assert "10.0.0.77:1" in found
        await page.press("Escape")
        await page.click('#worker-columns [data-by="load"] button')
        assert "10.0.0.199:1" in (await page.evaluate(ROWS))[0]
        assert (
            await page.evaluate("document.querySelector('[data-by=load]').ariaSort") == "descending"
        )
        await page.click("#by-model")
        groups = await page.evaluate(ROWS)
        assert [group.split("\n")[0].split()[1] for group in groups] == ["odd", "even"]
        assert "100 workers" in groups[0]
        await page.click("#worker-rows .disclosure")
        assert len(await page.evaluate(ROWS)) == 102
        await page.press("?")
        await shows(page, "#help-dialog", "search the workers")
        await page.press("Escape")
        await page.click("#by-model")
        await push_words(page, "Show all 200")
        assert len(await page.evaluate(ROWS)) == 200


FAILED = """(() => {
    stopFeed();
    const workers = [...Array(9).keys()].map((number) => (
        {worker: "http://10.0.0." + number, progress: "failed", reason: number ? "ConnectError" : "status 500"}));
    const past = {id: "1", path: "/pause_generation", http_status: 502, ended_at: snapshot.at, secs: 1, workers};
    snapshot.weights = {...snapshot.weights, history: [past]};
    render();
})()"""


async def test_a_failed_operation_has_a_line_for_each_reason(page, tmp_path):
    async with chat_workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        await page.evaluate(FAILED)
        grouped = "10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 4 more: ConnectError"
        await shows(page, "#past-operations", "failed, 502", "10.0.0.0: status 500", grouped)


SYNCING = """(() => {
    stopFeed();
    const owner = {group_name: "g", master: "10.0.0.9:29500", caller: "trainer-7 from 10.0.0.9", age_secs: 130};
    snapshot.weights = {...snapshot.weights, sync: {owner, state: "armed", step_secs: 4, members: [], buckets: 1}};
    const held = {held_by: ["updating"], held_since: {updating: snapshot.at}, routable: false};
    Object.assign(snapshot.fleet[0], held);
    expandedWorkers.add(snapshot.fleet[0].id);
    render();
})()"""


async def test_a_weight_sync_shows_its_owner_and_age_and_can_be_aborted(page, tmp_path):
    async with chat_workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        await page.evaluate(SYNCING)
        owner = "by trainer-7 from 10.0.0.9"
        await shows(
            page, "#alerts", "A weight sync is open: g at 10.0.0.9:29500", f"{owner} for 2 min"
        )
        await shows(page, ".worker-details", "updating since", owner)
        await push_words(page, "Abort")
        await shows(page, "#confirm", "Abort the sync of g?", owner, "may hold a part of the round")
        await page.click("#confirm-ok")
        # The proxy itself has no such sync: the test made it up in the page.
        await shows(page, "#notification", "failed: no trainer has a group with this proxy")
