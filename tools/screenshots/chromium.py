"""A headless Chromium, controlled over the DevTools protocol through two pipes.

Contract: a page is a tab with its own profile. Input goes through the browser as a user's does, so
an element that is covered, disabled or out of reach can't be clicked. The page's log messages,
errors and network requests are recorded.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import trio

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_SECS = 60
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--disable-sync", "--hide-scrollbars", "--no-proxy-server",
    # What a window would load before anyone needs it (the list below its address bar, a process for
    # its next page, the first new-tab page) costs more than the pages that are looked at.
    "--no-startup-window",
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,SpareRendererForSitePerProcess",
)  # fmt: skip
# Keys of the protocol's text-free events: name, code.
_IDS = count(1)  # of messages; unique, because a browser may answer late for a closed tab
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Every method that waits raises TimeoutError with what it waited for."""

    def __init__(self, to: trio.lowlevel.FdStream, out: trio.lowlevel.FdStream) -> None:
        self.console_errors: list[str] = []  # console messages, uncaught errors and refused content
        self.asked: list[str] = []  # every URL that the page requested
        self._to = to
        self._out = out
        self._session = ""
        self._context = ""
        self._answers: dict[int, dict[str, Any]] = {}
        self._moved = trio.Event()

    async def listen(self) -> None:
        rest = b""
        async for piece in self._out:
            *whole, rest = (rest + piece).split(b"\0")
            for message in whole:
                self._take(json.loads(message))

    async def open(self) -> None:
        context = await self.call("Target.createBrowserContext")
        self._context = context["browserContextId"]
        target = await self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def close(self) -> None:
        """Close the tab and delete its profile."""
        self._session = ""
        await self.call("Target.disposeBrowserContext", browserContextId=self._context)

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the protocol; raises RuntimeError with the browser's message."""
        message_id = next(_IDS)
        message: dict[str, object] = {"id": message_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._to.send_all(json.dumps(message).encode() + b"\0")
        with _timeout(method):
            while message_id not in self._answers:
                await self._moved.wait()
        answer = self._answers.pop(message_id)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def visit(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises RuntimeError if it throws."""
        reported = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reported:
            raise RuntimeError(f"{expression}: {reported['exceptionDetails']}")
        return reported["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Evaluate the expression in the tab repeatedly until it is true; it may navigate."""
        with _timeout(expression):
            while True:
                try:
                    return await self.evaluate(_TRUE_AT_LAST % expression)
                except RuntimeError as error:
                    if not any(words in str(error) for words in _LEFT):
                        raise
                    await trio.sleep(0.03)  # the next document may have no place for scripts yet

    async def text(self, selector: str = "body") -> str:
        """The element's visible text."""
        reported = await self.evaluate(
            f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"
        )
        return str(reported)

    async def click(self, selector: str) -> None:
        """Scroll to the element and click it as soon as nothing covers it."""
        x, y = await self.until(_REACHABLE % json.dumps(selector))
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key of KEYS, or a character."""
        text = "\r" if key == "Enter" else key if key not in KEYS else ""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key,
                windowsVirtualKeyCode=KEYS.get(key, ord(key[0].upper())),
                text=text if kind == "keyDown" else "",
            )  # fmt: skip

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size in CSS pixels; a narrow page also emulates touch."""
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """A PNG of the current view."""
        reported = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(reported["data"])

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if "method" in message and message.get("sessionId") != self._session:
            return  # an event of the browser, or of an earlier tab
        match message.get("method"):
            case None:
                self._answers[message["id"]] = message
                moved, self._moved = self._moved, trio.Event()
                moved.set()
            case "Runtime.exceptionThrown":
                self.console_errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console_errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["source"] != "network":
                self.console_errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])


# Asked in the page: a message there and back for each look keeps three processes awake.
_TRUE_AT_LAST = """(async () => {
  for (;;) {
    const found = await (%s);
    if (found) return found;
    await new Promise((resume) => setTimeout(resume, 30));
  }
})()"""
# What the browser says if the document goes while a script waits in it.
_LEFT = (
    "navigated or closed",
    "context was destroyed",
    "Cannot find default execution context",
    "Promise was collected",
)
_REACHABLE = """(() => {
  const it = document.querySelector(%s);
  if (!it || it.disabled) return null;
  it.scrollIntoView({block: "center", behavior: "instant"});
  const box = it.getBoundingClientRect();
  const x = box.x + box.width / 2, y = box.y + box.height / 2;
  const top = document.elementFromPoint(x, y);
  return top && (it === top || it.contains(top) || top.contains(it)) ? [x, y] : null;
})()"""


@contextmanager
def _timeout(what: str) -> Iterator[None]:
    with trio.move_on_after(TIMEOUT_SECS) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError(f"{TIMEOUT_SECS} s without {what}")


@asynccontextmanager
async def chromium(path: str, *more_flags: str) -> AsyncIterator[Page]:
    """One page in its own browser."""
    browser = await trio.to_thread.run_sync(Browser, path, *more_flags)
    try:
        async with browser.tab() as page:
            yield page
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(browser.close)


class Browser:
    """A browser process with a new profile in its own folder; `close` removes both.

    One tab may be open at a time; different event loops may open tabs one after another. Start and
    `close` block.
    """

    def __init__(self, path: str, *more_flags: str) -> None:
        to_read, self._to = os.pipe()
        self._out, from_write = os.pipe()
        # The browser reads descriptor 3 and writes 4: use others, so that none is overwritten.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, from_write)]
        for end in (to_read, from_write):
            os.close(end)
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = [*FLAGS, *more_flags, f"--user-data-dir={self._profile.name}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it refuses to start as root with a sandbox
        shell = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *flags],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in theirs:
            os.close(end)

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Page]:
        async with (
            trio.lowlevel.FdStream(os.dup(self._to)) as to,
            trio.lowlevel.FdStream(os.dup(self._out)) as out,
            trio.open_nursery() as nursery,
        ):
            page = Page(to, out)
            nursery.start_soon(page.listen)
            try:
                await page.open()
                yield page
            finally:
                with trio.move_on_after(5, shield=True):
                    await page.close()
                nursery.cancel_scope.cancel()

    def close(self) -> None:
        os.close(self._to)  # the browser exits when its pipes are closed
        os.close(self._out)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()
