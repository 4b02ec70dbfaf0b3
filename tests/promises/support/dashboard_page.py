"""The dashboard of a real program with workers, in a browser."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from tests.promises.support.fleet_program import program, put, toml
from tools.screenshots.chromium import find_chromium

no_chromium = pytest.mark.skipif(
    not find_chromium(), reason="no Chromium: apt-get install chromium"
)


@asynccontextmanager
async def dashboard(page, tmp_path, fleet, **settings):
    """Runs a program with `fleet`, and opens its dashboard in `page`."""
    file = tmp_path / "proxy.toml"
    put(file, toml(fleet, **settings))
    async with program("--config", file) as running:
        await running.until_routable(*fleet)
        await page.visit(url_of(running))
        yield running


def url_of(running):
    return str(running.client.base_url.join("/dashboard"))


def row(worker):
    name = worker.url.replace(":", "%3A").replace("/", "%2F")
    return f'tr[data-worker="{name}"]'


def address(worker):
    return worker.url.removeprefix("http://")


async def shows(page, selector, *texts):
    """Waits until the element contains all texts."""
    wanted = f"""(() => {{
        const text = document.querySelector({json.dumps(selector)})?.innerText ?? "";
        return {json.dumps(texts)}.every((each) => text.includes(each));
    }})()"""
    try:
        await page.until(wanted)
    except TimeoutError:
        raise AssertionError(f"{texts} not in {await page.text(selector)!r}") from None


async def push(page, worker, word):
    """Clicks a button in the worker's row, once the list has stopped moving."""
    await page.until("performance.now() - rowsMovedAt > SETTLE_MS")
    await page.click(f"{row(worker)} .actions button:nth-child({word})")


def ids(fleet):
    return [worker.url.replace(":", "%3A").replace("/", "%2F") for worker in fleet]
