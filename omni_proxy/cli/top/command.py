"""`omni-proxy top`: the terminal's owner. Draws at each news, key or change of its size.

Exit status 0: quit; 1: no terminal, or it went away; 2: nobody could be asked (`--once`).
Invariant: the terminal is given back as it was, whatever ends us.

Keys out of a terminal: its mode while we own it, and what its bytes mean.

Invariant: the terminal is as it was before when the `with` is left, however.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from rich.console import Console
from rich.screen import Screen

from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.client.worker_changes import ChangeRefused, change_worker
from omni_proxy.cli.screen.feed_model import feed_of
from omni_proxy.cli.status import WIDTH, fetch_feed
from omni_proxy.cli.top.follower import FeedFollower, FeedStatus
from omni_proxy.cli.top.frame import render_frame
from omni_proxy.cli.top.view import QUIT, PendingAction, TopView

_KEYS: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\x03": "ctrl-c", b"\x0c": "ctrl-l", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b" ": "pagedown",
}  # fmt: skip
# An escape sequence of any kind, else one byte.
_TOKEN: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]|.", re.DOTALL)
_LFLAG, _CC = 3, 6  # places in what tcgetattr returns


def parse_keys(typed: bytes) -> list[str]:
    """The names of the keys; what is none of ours is left out."""
    found = []
    for token in _TOKEN.findall(typed):
        if token in _KEYS:
            found.append(_KEYS[token])
        elif len(token) == 1 and 0x20 < token[0] < 0x7F:
            found.append(token.decode("ascii"))
    return found


@contextmanager
def raw_keyboard(descriptor: int) -> Iterator[None]:
    """Each key comes when it is pressed, unseen; Ctrl-C and Ctrl-Z are keys too. Raises OSError."""
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error as error:
        raise OSError(*error.args) from None
    now = termios.tcgetattr(descriptor)
    # A signal would end or stop us while the screen is ours.
    now[_LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    now[_CC][termios.VMIN], now[_CC][termios.VTIME] = 1, 0
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone: nothing to put back
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


NO_TERMINAL: Final = 1
LOOK_SECS: Final = 1.0  # without news: ages go on
TYPED_BYTES: Final = 1024
_EPILOG: Final = """\
keys:
  q, Ctrl-C         quit
  up, down, k, j    choose a worker; also PgUp, PgDn, Home, End
  left, right       sort by another column; r reverses the order
  o                 only workers in trouble
  d, e, D, v        disable, enable, drain, revive the chosen worker; each asks before
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="omni-proxy top",
        description="The running proxy and its workers, live.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_target_arguments(made)
    made.add_argument("--once", action="store_true", help="print one frame with all rows, and end")
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        place = admin_target_of(arguments)
        if arguments.once:
            return _once(place)
    except AdminClientError as why:
        print(f"omni-proxy top: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
        print(
            "omni-proxy top: this is no terminal to draw on; `omni-proxy top --once` and "
            "`omni-proxy status` print",
            file=sys.stderr,
        )
        return NO_TERMINAL
    try:
        TopScreen(place, console).run(sys.stdin.fileno())
    except OSError:  # the terminal is gone, and with it whoever could be told
        return NO_TERMINAL
    return 0


def _once(place: AdminTarget) -> int:
    """Raises AdminClientError."""
    view = TopView()
    feed = feed_of(fetch_feed(place))
    view.show(feed)
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    Console(highlight=False, width=width, soft_wrap=True).print(
        render_frame(view, FeedStatus(feed, feed.history, "", 0.0), place.url, width)
    )
    return 0


class TopScreen:
    def __init__(self, place: AdminTarget, console: Console) -> None:
        self._place = place
        self._console = console
        self._view = TopView()
        self._answers: list[str] = []  # of changes, by the threads that asked for them
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)
        self._follower = FeedFollower(place, self._wake)

    def run(self, keyboard: int) -> None:
        """Until somebody quits. Raises OSError when the terminal is gone."""
        with ExitStack() as stack:
            stack.callback(self._follower.stop)
            stack.enter_context(raw_keyboard(keyboard))
            stack.enter_context(_signals(self._ring))
            stack.enter_context(self._console.screen())
            self._follower.start()
            while True:
                self._draw()
                ready, _, _ = select.select([keyboard, self._bell], [], [], LOOK_SECS)
                if self._bell in ready:
                    self._hush()
                if keyboard in ready and not self._obey(os.read(keyboard, TYPED_BYTES)):
                    return

    def _obey(self, typed: bytes) -> bool:
        """False: enough."""
        if not typed:
            raise OSError("the terminal has closed")
        for key in parse_keys(typed):
            wished = self._view.press(key)
            if wished == QUIT:
                return False
            if isinstance(wished, PendingAction):
                threading.Thread(target=self._grant, args=(wished,), daemon=True).start()
        return True

    def _grant(self, wish: PendingAction) -> None:
        """In a thread: an answer may wait for a weight update."""
        try:
            with AdminClient(self._place) as proxy:
                change_worker(proxy, wish.name, wish.worker_id)
            said = f"{wish.name} {wish.called}: done"
        except (AdminClientError, ChangeRefused) as why:
            said = f"{wish.name} {wish.called}: {why}"
        self._answers.append(said)
        self._wake()

    def _draw(self) -> None:
        heard = self._follower.heard()
        if heard.feed is not None and heard.feed is not self._view.feed:
            self._view.show(heard.feed)
        while self._answers:
            self._view.said = self._answers.pop(0)
        width, height = self._console.size
        shown = render_frame(self._view, heard, self._place.url, width, height)
        self._console.print(Screen(shown), end="")

    def _wake(self) -> None:
        try:
            os.write(self._ring, b"!")
        except OSError:  # full: it rings already
            return

    def _hush(self) -> None:
        try:
            while os.read(self._bell, TYPED_BYTES):
                pass
        except BlockingIOError:
            return


@contextmanager
def _signals(ring: int) -> Iterator[None]:
    """A change of the size wakes us; what would end us lets the terminal be mended first."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGWINCH: lambda *_: None, signal.SIGTERM: end, signal.SIGHUP: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    ringer = signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(ringer)
        for number, handler in before.items():
            signal.signal(number, handler)
