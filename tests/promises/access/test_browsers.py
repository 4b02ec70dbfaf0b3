"""Pages of other origins in a real browser against the real program, which has no key."""

import json
from contextlib import asynccontextmanager

import pytest

from tests.promises.support.dashboard_page import no_chromium
from tests.promises.support.fleet_program import program, put, record, toml, workers

pytestmark = no_chromium
STRANGER, REBOUND = "evil.example", "rebound.example"  # the browser resolves both to 127.0.0.1
# Requests that a page can send without a preflight, then some that need one.
ATTACKS = """(async () => {
  const simple = { mode: "no-cors", method: "POST", headers: { "content-type": "text/plain" } };
  const call = async (path, options) => {
    try { return (await fetch(BASE + path, options)).status; } catch { return "refused"; }
  };
  const image = (path) => new Promise((done) => {
    const it = new Image();
    it.onload = it.onerror = done;
    it.src = BASE + path;
  });
  const form = (path, field) => new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.name = "frame" + Math.random();
    document.documentElement.append(frame);
    frame.onload = done;
    const it = document.createElement("form");
    it.method = "POST";
    it.enctype = "text/plain";
    it.target = frame.name;
    it.action = BASE + path;
    const input = document.createElement("input");
    input.name = field;
    it.append(input);
    document.documentElement.append(it);
    it.submit();
  });
  await call("workers", { ...simple, body: '{"url": "http://127.0.0.1:9"}' });
  await call("reload", simple);
  await call("pause_generation", simple);
  await call("remove_worker?url=" + WORKER, simple);
  await call("flush_cache", { mode: "no-cors" });
  await image("flush_cache");
  await image("v1/rl/engine/release_memory_occupation?selector=x!%3Dy");
  await form("workers", '{"url": "http://127.0.0.1:9", "model": "');
  return [
    await call("workers", { method: "POST", headers: { "content-type": "application/json" },
                            body: '{"url": "http://127.0.0.1:9"}' }),
    await call("workers/" + encodeURIComponent(WORKER), { method: "DELETE" }),
    await call("config"),
    await call("status"),
  ];
})()"""


@pytest.fixture
async def page(browser):
    """Errors in the page's console are expected here, so they are not checked."""
    async with browser.tab() as page:
        yield page


@asynccontextmanager
async def running_server(tmp_path, **settings):
    """Yields the program and its worker."""
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        put(file, toml(fleet, **settings))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            yield running, fleet[0]


def url_with_host(name, url, path=""):
    return str(url.copy_with(host=name).join(path))


@pytest.mark.parametrize("target", ["127.0.0.1", "localhost", REBOUND])
async def test_a_page_of_another_origin_changes_nothing(page, tmp_path, target):
    async with running_server(tmp_path) as (running, worker):
        before = await running.get_json("/status")
        await page.visit(worker.url.replace("127.0.0.1", STRANGER))
        base = url_with_host(target, running.client.base_url, "/")
        outcome = await page.evaluate(
            f"(() => {{ const BASE = {json.dumps(base)}, WORKER = {json.dumps(worker.url)};"
            f" return {ATTACKS}; }})()"
        )
        assert outcome == ["refused"] * 4
        body = await running.get_json("/workers")
        assert [row["url"] for row in body["workers"]] == [worker.url]
        assert record(body, worker)["held_by"] == []
        after = await running.get_json("/status")
        assert after["revision"] == before["revision"]
        assert after["last_reload"] == before["last_reload"]
        assert worker.requests == 0  # probes are GET /health


async def test_a_rebound_host_name_is_refused_and_the_page_names_the_setting(page, tmp_path):
    async with running_server(tmp_path) as (running, _):
        await page.visit(url_with_host(REBOUND, running.client.base_url, "/dashboard"))
        await page.until("!document.querySelector('#sign-in').hidden")
        text = await page.text("#sign-in")
        assert f"add '{REBOUND}' to [admin] allowed_hosts" in text
        assert "its key" not in text
        assert await page.evaluate("fetch('/config').then((answer) => answer.status)") == 403


async def test_the_dashboard_works_under_an_allowed_host_name(page, tmp_path):
    allowed = f"[admin]\nallowed_hosts = ['{REBOUND}']\n"
    async with running_server(tmp_path, more=allowed) as (running, worker):
        await page.visit(url_with_host(REBOUND, running.client.base_url, "/dashboard"))
        await page.until("document.querySelector('#state').innerText.includes('Serving')")
        disable_worker = f"""fetch("/workers/" + encodeURIComponent({json.dumps(worker.url)}), {{
            method: "PUT", headers: {{ "Content-Type": "application/json" }},
            body: '{{"disabled": true}}' }}).then((answer) => answer.status)"""
        assert await page.evaluate(disable_worker) == 200
        assert record(await running.get_json("/workers"), worker)["disabled"]


async def test_a_page_of_another_origin_may_call_a_model(page, tmp_path):
    async with running_server(tmp_path) as (running, worker):
        await page.visit(worker.url.replace("127.0.0.1", STRANGER))
        url = str(running.client.base_url.join("/v1/chat/completions"))
        response = await page.evaluate(f"""fetch({json.dumps(url)}, {{ method: "POST",
            headers: {{ "content-type": "application/json", "authorization": "Bearer k" }},
            body: '{{"messages": []}}' }}).then(async (answer) => [
                answer.status, await answer.text(), answer.headers.get("x-sglang-omni-worker")])""")
        assert response[:2] == [200, '{"worker": "w"}']
        assert response[2] is not None
