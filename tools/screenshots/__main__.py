"""`python -m tools.screenshots`: takes the screenshots in docs/pictures of a running dashboard."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import trio

from tools.screenshots.chromium import chromium, find_chromium
from tools.screenshots.png import smaller
from tools.screenshots.staged import staged

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
# Name, width and height in CSS pixels, dark.
SHOTS = (
    ("dashboard-light", 1400, 1000, False),
    ("dashboard-dark", 1400, 1000, True),
    ("dashboard-phone", 375, 812, False),
)


async def main(path: str, secs: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with staged(Path(folder)) as stage, chromium(path) as page:
            await page.resize(1400, 1000)
            await page.visit(stage.url + "/dashboard")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stage.traffic)
                await stage.cause_incidents(secs)
                for name, width, height, dark in SHOTS:
                    await page.resize(width, height, dark=dark)
                    await trio.sleep(1.5)  # until the next event of the feed, which redraws
                    (FOLDER / f"{name}.png").write_bytes(smaller(await page.picture()))
                    print(FOLDER / f"{name}.png")
                nursery.cancel_scope.cancel()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__)
    parser.add_argument(
        "--secs", type=float, default=840, help="seconds of traffic before the screenshots"
    )
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    browser = find_chromium()
    if browser is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    FOLDER.mkdir(parents=True, exist_ok=True)
    trio.run(main, browser, asked.secs)
