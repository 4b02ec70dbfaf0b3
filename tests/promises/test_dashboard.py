"""The dashboard in a real browser, before the real program."""

import hashlib
import json

import trio

from tests.ports import free_port
from tests.promises.dashboard_page import (
    address,
    dashboard,
    ids,
    no_chromium,
    push,
    row,
    shows,
    url_of,
)
from tests.promises.engines import engines
from tests.promises.fleet_program import Worker, program, put, record, toml, workers

KEY = "open-sesame"
pytestmark = no_chromium

SWITCH, DRAIN, REVIVE, REMOVE = 1, 2, 3, 4


async def test_a_client_on_call_sees_the_fleet_and_switches_workers(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        one, two = fleet
        await shows(page, "#state", "Serving with all 2 workers")
        for worker in fleet:
            await shows(page, row(worker), address(worker), "takes requests")
        await shows(page, "#alerts", "No problems")

        await push(page, one, SWITCH)
        await shows(page, row(one), "disabled", "Enable")
        await shows(page, "#state", "Serving with 1 of 2 workers")
        await shows(page, "#alerts", f"{address(one)} is out", "disabled")
        assert record(await running.get_json("/workers"), one)["disabled"]

        await push(page, one, SWITCH)
        await shows(page, row(one), "takes requests", "Disable")
        assert not record(await running.get_json("/workers"), one)["disabled"]

        await push(page, two, REMOVE)
        await shows(page, "#confirm", address(two), "Cancel")
        await page.press("Escape")
        await page.until("!document.querySelector('#confirm').open")
        assert len((await running.get_json("/workers"))["workers"]) == 2
        await push(page, two, REMOVE)
        await page.click("#confirm-yes")
        await page.until(f"!document.querySelector({json.dumps(row(two))})")
        assert [each["url"] for each in (await running.get_json("/workers"))["workers"]] == [
            one.url
        ]

        assert {url for url in page.asked if not url.startswith("data:")} <= {
            str(running.client.base_url.join(path))
            for path in (
                "/dashboard", "/feed", "/history?secs=900",
                *(f"/workers/{each}" for each in ids(fleet)),
            )
        }  # fmt: skip


async def test_a_paused_fleet_is_no_serving_fleet(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        headers = {"User-Agent": "trainer-7"}
        body = {"mode": "retract"}
        await running.client.post("/pause_generation", json=body, headers=headers)
        await shows(page, "#state", "Not ready: all workers are PAUSED")
        ends_it = "omni-proxy weights continue"
        reported = ("PAUSED: 2 of 2 workers", "by trainer-7 from 127.0.0.1", "retract", ends_it)
        await shows(page, "#alerts", *reported)
        await shows(page, row(fleet[0]), "PAUSED", "trainer-7")
        assert (await running.client.get("/ready")).status_code == 503

        await running.client.post("/continue_generation", json={})
        await shows(page, "#state", "Serving with all 2 workers")
        await shows(page, "#alerts", "No problems")


async def test_a_rollout_is_seen_until_it_has_ended(page, tmp_path):
    async with engines(2) as fleet, dashboard(page, tmp_path, fleet) as running:
        body = {"model_path": "/m", "weight_version": "v2", "pause_after_canary": True}
        headers = {"User-Agent": "operator-3"}
        await running.client.post("/weights/rollout", json=body, headers=headers)
        reported = ("Rollout to v2: paused", "1 of 2 workers updated", "resume continues")
        await shows(page, "#alerts", *reported)
        rows = (f"{address(fleet[0])} updated", f"{address(fleet[1])} pending", "operator-3")
        await shows(page, "#weights-now", "Rollout to v2 is paused", *rows)
        assert "different weights" not in await page.text("#alerts")
        await running.client.post("/weights/rollout/resume")
        await shows(page, "#alerts", "No problems")
        await shows(page, "#weights-says", "published: v2, epoch 1")


async def test_for_how_long_it_is_switched_off_is_reported_not_how_long_it_is_well(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet):
        later = "seconds(last.fleet[0].state_since) > seconds(last.fleet[0].since)"
        await shows(page, row(fleet[0]), "takes requests")  # else it may be drawn under the click
        await push(page, fleet[0], DRAIN)
        await shows(page, row(fleet[0]), "drained", "for ")
        assert await page.tell(later)
        await push(page, fleet[0], SWITCH)
        await shows(page, row(fleet[0]), "takes requests")
        assert not await page.tell(later)
        await push(page, fleet[0], SWITCH)
        await shows(page, row(fleet[0]), "disabled", "for ")
        assert await page.tell(later)


async def test_on_the_model_port_it_names_the_admin_listener(page, tmp_path):
    place = f"127.0.0.1:{free_port()}"
    settings = f'[admin]\napi_key = "{KEY}"\nlisten = "{place}"\n'
    async with (
        workers("one") as fleet,
        dashboard(page, tmp_path, fleet, more=settings) as running,
    ):
        await shows(page, "#elsewhere", "The dashboard is on the admin listener", place)
        assert await page.tell("document.querySelector('#locked').hidden")
        there = await page.tell("document.querySelector('#elsewhere-how a').href")
        assert there == f"http://{place}/dashboard"
        await page.visit(there)
        await shows(page, "#locked", "Enter the admin API key")
        await page.click("#key")
        await page.type(KEY)
        await page.press("Enter")
        # The page may ask its own address only, and there are no model routes.
        models = str(running.client.base_url).rstrip("/")
        await shows(page, "#playground", f"Model routes are at {models}", "curl", "Copy")
        assert await page.tell("document.querySelector('#chat').hidden")
        await page.until("past !== null")
        await page.resize(375, 812)
        fits = "(svg) => svg.getAttribute('viewBox').split(' ')[2] == svg.clientWidth"
        await page.until(f"[...document.querySelectorAll('.chart svg')].every({fits})")
        await page.until("document.querySelector('#caller-table').scrollWidth <= innerWidth")


async def test_a_silent_worker_is_highlighted(page, tmp_path):
    async with workers("a", "b") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, "#alerts", "No problems")
        alerts, badge, kind = await page.tell("""(() => {
            Object.assign(last.fleet[0], {silent_secs: 33, in_flight: 6});
            paint();
            const row = document.querySelector("#rows tr");
            return [document.querySelector("#alerts").innerText, row.innerText, row.className];
        })()""")
        assert "is silent: 6 in flight, and nothing has come from it for 33 s" in alerts
        assert "No problems" not in alerts
        assert "silent for 33 s" in badge
        assert "warn" in kind
        await shows(page, "#alerts", "No problems")


async def test_everything_can_be_done_with_the_keyboard(page, tmp_path):
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet) as running:
        (one,) = fleet
        await shows(page, row(one), "takes requests")
        await page.tell(f"document.querySelector({json.dumps(row(one) + ' .acts button')}).focus()")
        await page.press("Enter")
        await shows(page, "#confirm", "the only worker that takes requests")
        assert await page.tell("document.activeElement.id") == "confirm-no"
        await page.press("Tab")
        await page.press("Enter")
        await shows(page, "#state", "no worker takes requests")
        assert record(await running.get_json("/workers"), one)["disabled"]
        assert await page.tell("document.activeElement.textContent") == "Enable"
        await page.press("Enter")
        await shows(page, row(one), "takes requests")


async def test_without_the_key_nothing_is_reported(page, tmp_path):
    settings = f'[admin]\napi_key = "{KEY}"\n'
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet, more=settings) as running:
        (one,) = fleet
        everything = "document.documentElement.outerHTML"
        await shows(page, "#locked", "Enter the admin API key")
        assert address(one) not in await page.tell(everything)

        await page.click("#key")
        await page.type("wrong")
        await page.press("Enter")
        await shows(page, "#locked-why", "Wrong key")
        assert address(one) not in await page.tell(everything)

        await page.click("#key")
        await page.type(KEY)
        await page.press("Enter")
        await shows(page, row(one), "takes requests")
        await push(page, one, SWITCH)
        await page.click("#confirm-yes")
        await shows(page, row(one), "disabled")
        assert KEY not in await page.tell(everything)
        assert await page.tell("[localStorage.length, document.cookie]") == [0, ""]

        await page.visit(url_of(running))
        await shows(page, row(one), "disabled")
        await page.click("#forget")
        await shows(page, "#locked", "Enter the admin API key")
        reported = await page.tell(everything)
        assert (address(one) in reported, KEY in reported) == (False, False)
        assert await page.tell("sessionStorage.length") == 0


async def test_why_a_worker_died_can_be_read_and_it_can_be_revived(page, tmp_path):
    one, two = Worker("one"), Worker("two")
    async with trio.open_nursery() as nursery:
        life = trio.CancelScope()

        async def mortal(*, task_status):
            with life:
                await two.serve(task_status=task_status)

        await nursery.start(one.serve)
        await nursery.start(mortal)
        more = "[health]\n"
        assert more in toml([one])
        async with dashboard(page, tmp_path, [one, two]) as running:
            await shows(page, row(two), "takes requests")
            life.cancel()
            await shows(page, row(two), "unhealthy", "Connection refused")
            await shows(page, "#alerts", f"{address(two)} is out: unhealthy: Connection refused")
            assert "bad" in await page.tell(f"document.querySelector('{row(two)}').className")
            await push(page, two, REVIVE)
            await shows(page, "#told", address(two), "starts anew")
            assert record(await running.get_json("/workers"), two)["health_state"] != "healthy"
        nursery.cancel_scope.cancel()


async def test_a_drain_is_seen_until_it_is_over(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        one, _ = fleet
        await shows(page, row(one), "takes requests")
        one.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.ask)
            nursery.start_soon(running.ask)
            with trio.fail_after(30):
                await one.halfway.wait()
            await push(page, one, DRAIN)
            await shows(page, row(one), "draining", "1 in flight")
            one.gate.set()
        await shows(page, row(one), "drained")
        await push(page, one, SWITCH)
        await shows(page, row(one), "takes requests")


async def test_ends_and_a_refused_reload_can_be_read(page, tmp_path):
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet) as running:
        await running.ask(model="some-model")
        await shows(page, "#end-rows", "completed", "/v1/chat/completions", address(fleet[0]))
        await page.until("points.some((point) => point.requests > 0)")
        assert await shifted_meanwhile(page, running) == []
        put(tmp_path / "proxy.toml", "[server]\nprot = 1\n")
        await page.click("#reload")
        await shows(page, "#config", "refused", "server.prot", "did you mean `port`?")
        await shows(page, "#alerts", "The last reload was refused", "line 2")
        await page.click("#running summary")
        await shows(page, "#running-text", '"drain_timeout_secs"')


async def test_both_workers_of_a_request_in_two_legs_can_be_read(page, tmp_path):
    async with workers("one", "two") as fleet:
        text = toml(fleet)
        for worker, role in zip(fleet, ("prefill", "decode"), strict=True):
            entry = f'url = "{worker.url}"\n'
            text = text.replace(entry, f'{entry}role = "{role}"\nkv_connector = "nixl"\n')
        put(tmp_path / "proxy.toml", text)
        async with program("--config", tmp_path / "proxy.toml") as running:
            await running.until_routable(*fleet)
            await page.visit(url_of(running))
            await running.ask()
            await shows(page, "#end-rows", " \u203a ".join(map(address, fleet)))
            await shows(page, row(fleet[0]), "prefill")
            await shows(page, row(fleet[1]), "decode")


async def shifted_meanwhile(page, running):
    """Which parts of the page moved while it drew two more seconds of requests.

    Not the words of a chart's key: the next one makes room for a longer number.
    """
    await page.tell("""
        window.moved = [];
        new PerformanceObserver((list) => moved.push(...list.getEntries().flatMap(
          (entry) => entry.sources.map(({node}) => node?.closest ? node : node?.parentElement)
            .filter((it) => it && !it.closest(".key"))
            .map((it) => `${it.closest("section")?.id} ${it.outerHTML.slice(0, 200)}`))))
          .observe({type: "layout-shift"}) ?? null
    """)
    seen = await page.tell("last.at")
    for _ in range(2):
        await running.ask(model="some-model")
        await page.until(f"last.at > {json.dumps(seen)}")
        seen = await page.tell("last.at")
    shifted = await page.tell("moved.splice(0)")
    await page.tell("document.querySelector('main').style.paddingTop = '90px'")
    await page.until("moved.length")  # it does notice
    return shifted


async def test_the_explain_box_shows_the_pick_or_why_there_is_none(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        one, two = fleet
        await running.client.put(f"/workers/{ids(fleet)[0]}", json={"disabled": True})
        await shows(page, row(one), "disabled")
        await page.click("#ask button")
        await shows(page, "#answer", f"It would go to {address(two)}", "disabled")
        await running.client.put(f"/workers/{ids(fleet)[1]}", json={"disabled": True})
        await page.click("#ask button")
        await shows(page, "#answer", "Nobody can take it", "all_disabled")
        await page.tell("document.querySelector('#body').select()")
        await page.click("#body")
        await page.tell("document.querySelector('#body').select()")
        await page.type("{not json")
        await page.click("#ask button")
        await shows(page, "#answer", "JSON")


async def test_it_fits_a_phone_whatever_others_name_light_and_dark(page, tmp_path):
    await page.resize(375, 812)
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet[:1]) as running:
        nasty = "<img src=x onerror=alert(1)>" + "long" * 40
        added = {"url": fleet[1].url, "model": nasty}
        assert (await running.client.post("/workers", json=added)).status_code == 200
        await shows(page, row(fleet[1]), "<img src=x", "takes requests")
        assert await page.tell("document.querySelectorAll('img').length") == 0
        for width, dark in ((375, False), (320, True)):
            await page.resize(width, 812, dark=dark)
            await page.until(f"innerWidth === {width}")
            assert await page.tell("document.documentElement.scrollWidth") <= width
            assert (await lightness(page) < 40) is dark
        await push(page, fleet[0], SWITCH)
        await shows(page, row(fleet[0]), "disabled")


async def lightness(page):
    """Of the background, 0 to 255."""
    reported = await page.tell("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, reported.removeprefix("rgb(").removesuffix(")").split(","))) / 3


async def test_a_lost_connection_is_shown_and_restored(page, tmp_path):
    port = free_port()
    async with workers("one") as fleet:
        (one,) = fleet
        async with dashboard(page, tmp_path, fleet, port=port):
            await shows(page, row(one), "takes requests")
        await shows(page, "#lost", "Connection lost", "What you see is from", "Trying again")
        await shows(page, "#state", "Last known: Serving")
        async with program("--config", tmp_path / "proxy.toml") as running:
            await running.until_routable(one)
            await page.until("document.querySelector('#lost').hidden")
            await shows(page, row(one), "takes requests")
        page.complaints.clear()


async def test_a_page_that_was_left_has_no_feed_until_one_goes_back_to_it(page, tmp_path):
    """A browser opens six connections to a host: pages that it only keeps must not hold them."""
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        await page.tell("window.left = {feed: aborting.signal, at: last.at}, true")
        await page.visit("about:blank")
        await page.tell("history.back()")
        await page.until("window.left && last.at > left.at")  # the page that was left
        assert await page.tell("left.feed.aborted")


async def test_a_key_that_may_only_read_sees_all_and_learns_what_it_may_not(page, tmp_path):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    settings = f'[[admin.keys]]\nname = "viewer"\nkey_sha256 = "{digest}"\n'
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet, more=settings):
        await shows(page, "#locked", "[[admin.keys]]")
        await page.click("#key")
        await page.type(KEY)
        await page.press("Enter")
        await shows(page, row(fleet[0]), "takes requests")
        await push(page, fleet[0], SWITCH)
        await shows(page, "body", "'viewer' has the role read")
        await shows(page, row(fleet[0]), "takes requests")
        assert await page.tell("document.querySelector('#locked').hidden")


async def test_callers_are_shown_where_there_are_any(page, tmp_path):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys = f'[[keys]]\nname = "team-a"\nmax_inflight = 5\nkey_sha256 = "{digest}"\n'
    async with workers("a") as fleet, dashboard(page, tmp_path, fleet, more=keys) as running:
        for key in (KEY, "wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            await running.client.post("/v1/chat/completions", json={}, headers=headers)
        await shows(page, "#callers", "team-a", "0 of 5", "1")
