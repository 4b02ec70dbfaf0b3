"""The dashboard of a proxy shows all proxies of its cluster as one, in a real browser."""

import trio

from tests.promises.cluster.test_cluster import cluster, held_requests
from tests.promises.support.dashboard_page import no_chromium, row, shows, url_of
from tests.redis_server import needs_store

pytestmark = [no_chromium, needs_store]

TILES = """(() => {
    const tiles = [...document.querySelectorAll("#tiles div")];
    return Object.fromEntries(tiles.map((tile) => tile.innerText.split("\\n")));
})()"""


async def test_figures_are_sums_over_the_proxies_and_each_has_a_row(page, tmp_path):
    async with cluster(tmp_path) as (_, fleet, (first, second)):
        for _ in range(3):
            await second.ask()
        async with trio.open_nursery() as nursery, held_requests(second, fleet, 2):
            nursery.start_soon(first.ask)
            await page.visit(url_of(first))
            await shows(page, "#proxy-name", "proxy p0")
            await shows(page, "#proxies-summary", "cluster omni: 2 proxies; figures of the fleet")
            await shows(page, "#proxy-rows", "p0", "this page", "p1", " ago")
            await page.until(f"({TILES})['In flight'] === '3'")
            link = "document.querySelector('#proxy-rows a')"
            assert await page.evaluate(f"{link}.href") == url_of(second)
            await page.until(f"{link}.closest('tr').innerText.includes('0.')")
            # Requests of the other proxy count in the worker's row and in the fleet's charts.
            rate = f"document.querySelector({row(fleet[0])!r} + ' td:nth-of-type(3)').innerText"
            await page.until(f"Number({rate}) > 0")
            await page.until("chartData?.series.requests_per_sec.some((value) => value > 0)")
            await page.evaluate("selectCharts(900, THIS_PROXY)")
            await page.until("chartData?.series.in_flight.some((value) => value > 0)")
            assert not await page.evaluate(
                "chartData.series.requests_per_sec.some((value) => value > 0)"
            )
            await page.click("#proxy-rows a")
            await shows(page, "#proxy-name", "proxy p1")
