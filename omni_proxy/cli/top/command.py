"""`omni-proxy top`: the terminal's mode, its keys, and the main loop, which redraws on each
snapshot, key or resize.

Exit status 0: quit; 1: no terminal, or it was closed; 2: no proxy could be reached (`--once`).
Invariant: the terminal's mode is restored however the program ends.
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
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.client.feed_model import feed_of
from omni_proxy.cli.client.worker_changes import ChangeRefused, change_worker
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.status import LEGEND, WIDTH, fetch_feed
from omni_proxy.cli.terminal_text import display_width, truncate
from omni_proxy.cli.top.follower import FeedFollower, FeedStatus
from omni_proxy.cli.top.frame import render_frame
from omni_proxy.cli.top.view import QUIT, Click, PendingAction, TopView

_KEYS: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\x03": "ctrl-c", b"\x0c": "ctrl-l", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b" ": "space", b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip
# An escape sequence of any kind, else one byte.
_TOKEN: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]|.", re.DOTALL)
# A press of a button, xterm's form 1006: the button with its modifiers, column and line from 1.
_MOUSE: Final = re.compile(rb"\x1b\[<(\d{1,4});(\d{1,5});(\d{1,5})M")
_LEFT, _BUTTONS = 0, 0b11000011  # without the bits of modifiers and of motion
_WHEEL: Final = {64: "wheelup", 65: "wheeldown"}
_MOUSE_ON, _MOUSE_OFF = "\x1b[?1000h\x1b[?1006h", "\x1b[?1006l\x1b[?1000l"
_LFLAG, _CC = 3, 6  # indices into the result of tcgetattr


def parse_keys(typed: bytes) -> list[str | Click]:
    """The names of the keys, and clicks; unknown sequences are dropped."""
    names: list[str | Click] = []
    for token in _TOKEN.findall(typed):
        if token in _KEYS:
            names.append(_KEYS[token])
        elif mouse := _MOUSE.fullmatch(token):
            button, column, line = (int(number) for number in mouse.groups())
            if button & _BUTTONS == _LEFT:
                names.append(Click(column - 1, line - 1))
            elif button & _BUTTONS in _WHEEL:
                names.append(_WHEEL[button & _BUTTONS])
        elif len(token) == 1 and 0x20 < token[0] < 0x7F:
            names.append(token.decode("ascii"))
    return names


@contextmanager
def raw_keyboard(descriptor: int) -> Iterator[None]:
    """Unbuffered keys without echo; Ctrl-C and Ctrl-Z are keys too. Raises OSError."""
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error as error:
        raise OSError(*error.args) from None
    now = termios.tcgetattr(descriptor)
    # A signal would end or stop the program on the alternate screen.
    now[_LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    now[_CC][termios.VMIN], now[_CC][termios.VTIME] = 1, 0
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has closed: nothing to restore
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


NO_TERMINAL: Final = 1
REDRAW_SECS: Final = 1.0  # redraw without a new snapshot: ages change
TYPED_BYTES: Final = 1024
_EPILOG: Final = """\
keys:
  q, Ctrl-C         quit
  up, down, k, j    select a worker; also PgUp, PgDn, Home, End
  left, right       sort by another column; r reverses the order
  /                 search: only workers with this text in name, URL, model, role, state or weights
  o                 only workers with problems
  d, e, D, v        disable, enable, drain, revive the selected worker; each asks for confirmation
  ?                 these keys
  mouse             a click selects a worker or sorts by a column, the wheel scrolls; hold Shift to
                    select text
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy top",
        description="Show the running proxy and its workers, live.",
        epilog=_EPILOG,
    )
    add_target_arguments(result)
    result.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    result.add_argument(
        "--once",
        action="store_true",
        help="print one frame with all rows and exit; in a pipe, lines are as long as needed, or "
        "COLUMNS wide",
    )
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        target = admin_target_of(arguments)
        if arguments.once:
            return _once(target)
    except AdminClientError as error:
        print(f"omni-proxy top: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
        print(
            "omni-proxy top: this is not an interactive terminal; use `omni-proxy top --once` or "
            "`omni-proxy status`",
            file=sys.stderr,
        )
        return NO_TERMINAL
    try:
        TopScreen(target, console, mouse=not arguments.no_mouse).run(sys.stdin.fileno())
    except OSError:  # the terminal has closed: nowhere to report it
        return NO_TERMINAL
    return 0


def _once(target: AdminTarget) -> int:
    """Raises AdminClientError."""
    view = TopView()
    feed = feed_of(fetch_feed(target))
    view.show(feed)
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    # In a pipe lines are not truncated, unless COLUMNS gives a width.
    view.unlimited_width = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal()
    status = FeedStatus(feed, feed.history, "", 0.0)
    frame = render_frame(view, status, target.url, width)
    frame.append(f"\n{LEGEND if view.unlimited_width else truncate(LEGEND, width)}", "dim")
    widest = max(map(display_width, frame.plain.split("\n")))
    Console(highlight=False, width=max(width, widest), soft_wrap=True).print(frame)
    return 0


class TopScreen:
    def __init__(self, target: AdminTarget, console: Console, *, mouse: bool) -> None:
        self._target = target
        self._mouse = mouse
        self._console = console
        self._view = TopView()
        self._answers: list[str] = []  # results of actions, appended by their threads
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._follower = FeedFollower(target, self._wake)

    def run(self, keyboard: int) -> None:
        """Run until the user quits. Raises OSError when the terminal has closed."""
        with ExitStack() as stack:
            stack.callback(self._follower.stop)
            stack.enter_context(raw_keyboard(keyboard))
            stack.enter_context(_signals(self._wake_writer))
            stack.enter_context(self._console.screen())
            if self._mouse:
                stack.enter_context(_mouse_reports(self._console))
            self._follower.start()
            while True:
                self._draw()
                ready, _, _ = select.select([keyboard, self._wake_reader], [], [], REDRAW_SECS)
                if self._wake_reader in ready:
                    self._drain_wakeups()
                if keyboard in ready and not self._handle_keys(os.read(keyboard, TYPED_BYTES)):
                    return

    def _handle_keys(self, typed: bytes) -> bool:
        """Returns False to quit."""
        if not typed:
            raise OSError("the terminal has closed")
        for key in parse_keys(typed):
            action = self._view.press(key)
            if action == QUIT:
                return False
            if isinstance(action, PendingAction):
                threading.Thread(target=self._perform, args=(action,), daemon=True).start()
        return True

    def _perform(self, pending: PendingAction) -> None:
        """Runs in a thread: the reply may wait for a weight update."""
        try:
            with AdminClient(self._target) as proxy:
                change_worker(proxy, pending.action, pending.worker_id)
            message = f"{pending.action} {pending.worker_name}: done"
        except (AdminClientError, ChangeRefused) as error:
            message = f"{pending.action} {pending.worker_name}: {error}"
        self._answers.append(message)
        self._wake()

    def _draw(self) -> None:
        feed_status = self._follower.status()
        if feed_status.feed is not None and feed_status.feed is not self._view.feed:
            self._view.show(feed_status.feed)
        while self._answers:
            self._view.message = self._answers.pop(0)
        width, height = self._console.size
        frame = render_frame(self._view, feed_status, self._target.url, width, height)
        self._console.print(Screen(frame), end="")

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"!")
        except OSError:  # full: a wake-up is pending already
            return

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wake_reader, TYPED_BYTES):
                pass
        except BlockingIOError:
            return


@contextmanager
def _mouse_reports(console: Console) -> Iterator[None]:
    """Make the terminal send clicks and the wheel as escape sequences (xterm, modes 1000, 1006)."""
    console.file.write(_MOUSE_ON)
    console.file.flush()
    try:
        yield
    finally:
        with suppress(OSError):  # the terminal has closed
            console.file.write(_MOUSE_OFF)
            console.file.flush()


@contextmanager
def _signals(wake_writer: int) -> Iterator[None]:
    """SIGWINCH wakes the loop; SIGTERM and SIGHUP end it, so that the terminal is restored."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGWINCH: lambda *_: None, signal.SIGTERM: end, signal.SIGHUP: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    previous_fd = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
