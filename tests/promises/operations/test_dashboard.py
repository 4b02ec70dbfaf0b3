"""The dashboard of the real program in a real browser."""

import hashlib
import json

import trio

from tests.ports import free_port
from tests.promises.support.dashboard_page import (
    address,
    dashboard,
    ids,
    no_chromium,
    push,
    row,
    shows,
    url_of,
)
from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import Worker, program, put, record, toml, workers

KEY = "open-sesame"
pytestmark = no_chromium

SWITCH, DRAIN, REVIVE, REMOVE = 1, 2, 3, 4


async def test_an_operator_sees_the_fleet_and_disables_enables_and_removes_workers(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        one, two = fleet
        await shows(page, "#state", "Serving with all 2 workers")
        for worker in fleet:
            await shows(page, row(worker), address(worker), "takes requests")
        await shows(page, "#alerts", "No problems")

        await push(page, one, SWITCH)
        await shows(page, row(one), "disabled", "Enable")
        await shows(page, "#state", "Serving with 1 of 2 workers")
        await shows(page, "#alerts", f"{address(one)} is out of rotation", "disabled")
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
        await page.click("#confirm-ok")
        await page.until(f"!document.querySelector({json.dumps(row(two))})")
        assert [row["url"] for row in (await running.get_json("/workers"))["workers"]] == [one.url]

        assert {url for url in page.asked if not url.startswith("data:")} <= {
            str(running.client.base_url.join(path))
            for path in (
                "/dashboard", "/feed", "/history?secs=900",
                *(f"/workers/{worker_id}" for worker_id in ids(fleet)),
            )
        }  # fmt: skip


async def test_a_paused_fleet_is_shown_as_not_ready(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        headers = {"User-Agent": "trainer-7"}
        body = {"mode": "retract"}
        await running.client.post("/pause_generation", json=body, headers=headers)
        await shows(page, "#state", "Not ready: all workers are PAUSED")
        command = "omni-proxy weights continue"
        alert = ("PAUSED: 2 of 2 workers", "by trainer-7 from 127.0.0.1", "retract", command)
        await shows(page, "#alerts", *alert)
        await shows(page, row(fleet[0]), "PAUSED", "trainer-7")
        assert (await running.client.get("/ready")).status_code == 503

        await running.client.post("/continue_generation", json={})
        await shows(page, "#state", "Serving with all 2 workers")
        await shows(page, "#alerts", "No problems")


async def test_a_rollout_is_shown_until_it_ends(page, tmp_path):
    async with engines(2) as fleet, dashboard(page, tmp_path, fleet) as running:
        body = {"model_path": "/m", "weight_version": "v2", "pause_after_canary": True}
        headers = {"User-Agent": "operator-3"}
        await running.client.post("/weights/rollout", json=body, headers=headers)
        alert = ("Rollout to v2: paused", "1 of 2 workers updated", "resume continues")
        await shows(page, "#alerts", *alert)
        rows = (f"{address(fleet[0])} updated", f"{address(fleet[1])} pending", "operator-3")
        await shows(page, "#current-operations", "Rollout to v2 is paused", *rows)
        assert "different weight versions" not in await page.text("#alerts")
        await running.client.post("/weights/rollout/resume")
        await shows(page, "#alerts", "No problems")
        await shows(page, "#weights-summary", "published: v2, epoch 1")


async def test_a_disabled_worker_shows_how_long_it_has_been_disabled(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet):
        disabled_after_healthy = (
            "toSeconds(snapshot.fleet[0].state_since) > toSeconds(snapshot.fleet[0].since)"
        )
        # Otherwise a redraw may move the button during the click.
        await shows(page, row(fleet[0]), "takes requests")
        await push(page, fleet[0], DRAIN)
        await shows(page, row(fleet[0]), "drained", "for ")
        assert await page.evaluate(disabled_after_healthy)
        await push(page, fleet[0], SWITCH)
        await shows(page, row(fleet[0]), "takes requests")
        assert not await page.evaluate(disabled_after_healthy)
        await push(page, fleet[0], SWITCH)
        await shows(page, row(fleet[0]), "disabled", "for ")
        assert await page.evaluate(disabled_after_healthy)


async def test_on_the_model_port_the_page_links_to_the_admin_listener(page, tmp_path):
    admin_address = f"127.0.0.1:{free_port()}"
    settings = f'[admin]\napi_key = "{KEY}"\nlisten = "{admin_address}"\n'
    async with (
        workers("one") as fleet,
        dashboard(page, tmp_path, fleet, more=settings) as running,
    ):
        await shows(
            page, "#admin-listener", "The dashboard is on the admin listener", admin_address
        )
        assert await page.evaluate("document.querySelector('#sign-in').hidden")
        link = await page.evaluate("document.querySelector('#admin-listener-link a').href")
        assert link == f"http://{admin_address}/dashboard"
        await page.visit(link)
        await shows(page, "#sign-in", "Enter the admin API key")
        await page.click("#admin-key")
        await page.type(KEY)
        await page.press("Enter")
        # The page may call only its own address, and the admin listener has no model routes.
        models = str(running.client.base_url).rstrip("/")
        await shows(page, "#chat", f"Model routes are at {models}", "curl", "Copy")
        assert await page.evaluate("document.querySelector('#chat-form').hidden")
        await page.until("chartData !== null")
        await page.resize(375, 812)
        fits = "(svg) => svg.getAttribute('viewBox').split(' ')[2] == svg.clientWidth"
        await page.until(f"[...document.querySelectorAll('.chart svg')].every({fits})")
        await page.until("document.querySelector('#caller-table').scrollWidth <= innerWidth")


async def test_a_silent_worker_is_highlighted(page, tmp_path):
    async with workers("a", "b") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, "#alerts", "No problems")
        alerts, badge, kind = await page.evaluate("""(() => {
            Object.assign(snapshot.fleet[0], {silent_secs: 33, in_flight: 6});
            render();
            const row = document.querySelector("#worker-rows tr");
            return [document.querySelector("#alerts").innerText, row.innerText, row.className];
        })()""")
        assert "is silent: 6 in flight, no response data for 33 s" in alerts
        assert "No problems" not in alerts
        assert "silent for 33 s" in badge
        assert "warning" in kind
        await shows(page, "#alerts", "No problems")


async def test_workers_can_be_disabled_and_enabled_with_the_keyboard(page, tmp_path):
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet) as running:
        (one,) = fleet
        await shows(page, row(one), "takes requests")
        await page.evaluate(
            f"document.querySelector({json.dumps(row(one) + ' .actions button')}).focus()"
        )
        await page.press("Enter")
        await shows(page, "#confirm", "the only worker that takes requests")
        assert await page.evaluate("document.activeElement.id") == "confirm-cancel"
        await page.press("Tab")
        await page.press("Enter")
        await shows(page, "#state", "no worker takes requests")
        assert record(await running.get_json("/workers"), one)["disabled"]
        assert await page.evaluate("document.activeElement.textContent") == "Enable"
        await page.press("Enter")
        await shows(page, row(one), "takes requests")


async def test_without_the_key_the_page_shows_nothing(page, tmp_path):
    settings = f'[admin]\napi_key = "{KEY}"\n'
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet, more=settings) as running:
        (one,) = fleet
        page_source = "document.documentElement.outerHTML"
        await shows(page, "#sign-in", "Enter the admin API key")
        assert address(one) not in await page.evaluate(page_source)

        await page.click("#admin-key")
        await page.type("wrong")
        await page.press("Enter")
        await shows(page, "#sign-in-error", "Invalid key")
        assert address(one) not in await page.evaluate(page_source)

        await page.click("#admin-key")
        await page.type(KEY)
        await page.press("Enter")
        await shows(page, row(one), "takes requests")
        await push(page, one, SWITCH)
        await page.click("#confirm-ok")
        await shows(page, row(one), "disabled")
        assert KEY not in await page.evaluate(page_source)
        assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

        await page.visit(url_of(running))
        await shows(page, row(one), "disabled")
        await page.click("#sign-out")
        await shows(page, "#sign-in", "Enter the admin API key")
        source = await page.evaluate(page_source)
        assert (address(one) in source, KEY in source) == (False, False)
        assert await page.evaluate("sessionStorage.length") == 0


async def test_the_reason_for_a_dead_worker_is_shown_and_it_can_be_revived(page, tmp_path):
    one, two = Worker("one"), Worker("two")
    async with trio.open_nursery() as nursery:
        life = trio.CancelScope()

        async def serve_two(*, task_status):
            with life:
                await two.serve(task_status=task_status)

        await nursery.start(one.serve)
        await nursery.start(serve_two)
        more = "[health]\n"
        assert more in toml([one])
        async with dashboard(page, tmp_path, [one, two]) as running:
            await shows(page, row(two), "takes requests")
            life.cancel()
            await shows(page, row(two), "unhealthy", "Connection refused")
            await shows(
                page, "#alerts", f"{address(two)} is out of rotation: unhealthy: Connection refused"
            )
            assert "error" in await page.evaluate(f"document.querySelector('{row(two)}').className")
            await push(page, two, REVIVE)
            await shows(page, "#notification", address(two), "was revived")
            assert record(await running.get_json("/workers"), two)["health_state"] != "healthy"
        nursery.cancel_scope.cancel()


async def test_a_drain_is_shown_until_it_ends(page, tmp_path):
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


async def test_recent_requests_and_a_refused_reload_are_shown(page, tmp_path):
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet) as running:
        await running.ask(model="some-model")
        await shows(page, "#request-rows", "completed", "/v1/chat/completions", address(fleet[0]))
        await page.until("points.some((point) => point.requests > 0)")
        assert await shifted_elements(page, running) == []
        put(tmp_path / "proxy.toml", "[server]\nprot = 1\n")
        await page.click("#reload")
        await shows(page, "#config", "refused", "server.prot", "did you mean `port`?")
        await shows(page, "#alerts", "The last reload was refused", "line 2")
        await page.click("#effective-config summary")
        await shows(page, "#effective-config-text", '"drain_timeout_secs"')


async def test_both_workers_of_a_request_in_two_legs_are_shown(page, tmp_path):
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
            await shows(page, "#request-rows", " \u203a ".join(map(address, fleet)))
            await shows(page, row(fleet[0]), "prefill")
            await shows(page, row(fleet[1]), "decode")


async def shifted_elements(page, running):
    """The elements that moved while the page drew two more requests.

    A chart's legend is left out: its entries move when a number gets longer.
    """
    await page.evaluate("""
        window.moved = [];
        new PerformanceObserver((list) => moved.push(...list.getEntries().flatMap(
          (entry) => entry.sources.map(({node}) => node?.closest ? node : node?.parentElement)
            .filter((it) => it && !it.closest(".legend"))
            .map((it) => `${it.closest("section")?.id} ${it.outerHTML.slice(0, 200)}`))))
          .observe({type: "layout-shift"}) ?? null
    """)
    seen = await page.evaluate("snapshot.at")
    for _ in range(2):
        await running.ask(model="some-model")
        await page.until(f"snapshot.at > {json.dumps(seen)}")
        seen = await page.evaluate("snapshot.at")
    shifted = await page.evaluate("moved.splice(0)")
    await page.evaluate("document.querySelector('main').style.paddingTop = '90px'")
    await page.until("moved.length")  # the observer does report shifts
    return shifted


async def test_the_explain_box_shows_the_pick_or_why_there_is_none(page, tmp_path):
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet) as running:
        one, two = fleet
        await running.client.put(f"/workers/{ids(fleet)[0]}", json={"disabled": True})
        await shows(page, row(one), "disabled")
        await page.click("#explain-form button")
        await shows(page, "#explain-result", f"It would go to {address(two)}", "disabled")
        await running.client.put(f"/workers/{ids(fleet)[1]}", json={"disabled": True})
        await page.click("#explain-form button")
        await shows(page, "#explain-result", "No eligible worker", "all_disabled")
        await page.evaluate("document.querySelector('#explain-body').select()")
        await page.click("#explain-body")
        await page.evaluate("document.querySelector('#explain-body').select()")
        await page.type("{not json")
        await page.click("#explain-form button")
        await shows(page, "#explain-result", "JSON")


async def test_the_page_fits_a_phone_and_escapes_names_in_light_and_dark_mode(page, tmp_path):
    await page.resize(375, 812)
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet[:1]) as running:
        model = "<img src=x onerror=alert(1)>" + "long" * 40
        added = {"url": fleet[1].url, "model": model}
        assert (await running.client.post("/workers", json=added)).status_code == 200
        await shows(page, row(fleet[1]), "<img src=x", "takes requests")
        assert await page.evaluate("document.querySelectorAll('img').length") == 0
        for width, dark in ((375, False), (320, True)):
            await page.resize(width, 812, dark=dark)
            await page.until(f"innerWidth === {width}")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert (await lightness(page) < 40) is dark
        await push(page, fleet[0], SWITCH)
        await shows(page, row(fleet[0]), "disabled")


async def lightness(page):
    """The lightness of the background, 0 to 255."""
    colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


async def test_a_lost_connection_is_shown_and_restored(page, tmp_path):
    port = free_port()
    async with workers("one") as fleet:
        (one,) = fleet
        async with dashboard(page, tmp_path, fleet, port=port):
            await shows(page, row(one), "takes requests")
        await shows(page, "#disconnected", "Connection lost", "Showing data of", "Reconnecting in")
        await shows(page, "#state", "Last known: Serving")
        async with program("--config", tmp_path / "proxy.toml") as running:
            await running.until_routable(one)
            await page.until("document.querySelector('#disconnected').hidden")
            await shows(page, row(one), "takes requests")
        page.console_errors.clear()


async def test_a_page_in_the_back_forward_cache_has_no_feed(page, tmp_path):
    """Browsers open six connections to a host: pages that they only cache must not use them."""
    async with workers("one") as fleet, dashboard(page, tmp_path, fleet):
        await shows(page, row(fleet[0]), "takes requests")
        await page.evaluate("window.left = {feed: feedAbort.signal, at: snapshot.at}, true")
        await page.visit("about:blank")
        await page.evaluate("history.back()")
        await page.until("window.left && snapshot.at > left.at")  # the same page, restored
        assert await page.evaluate("left.feed.aborted")


async def test_a_read_only_key_sees_the_fleet_and_is_refused_changes(page, tmp_path):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    settings = f'[[admin.keys]]\nname = "viewer"\nkey_sha256 = "{digest}"\n'
    async with workers("one", "two") as fleet, dashboard(page, tmp_path, fleet, more=settings):
        await shows(page, "#sign-in", "[[admin.keys]]")
        await page.click("#admin-key")
        await page.type(KEY)
        await page.press("Enter")
        await shows(page, row(fleet[0]), "takes requests")
        await push(page, fleet[0], SWITCH)
        await shows(page, "body", "'viewer' has the role read")
        await shows(page, row(fleet[0]), "takes requests")
        assert await page.evaluate("document.querySelector('#sign-in').hidden")


async def test_callers_are_shown_where_keys_are_configured(page, tmp_path):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys = f'[[keys]]\nname = "team-a"\nmax_inflight = 5\nkey_sha256 = "{digest}"\n'
    async with workers("a") as fleet, dashboard(page, tmp_path, fleet, more=keys) as running:
        for key in (KEY, "wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            await running.client.post("/v1/chat/completions", json={}, headers=headers)
        await shows(page, "#callers", "team-a", "0 of 5", "1")
