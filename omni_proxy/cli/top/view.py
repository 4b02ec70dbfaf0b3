"""State of the screen: the order of the rows, the search, the selected worker, the action to
confirm.

Pure. Invariant: the selected worker stays selected while it is in the fleet, whatever its row; no
action is returned that the user has not confirmed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from omni_proxy.cli.client.feed_model import FeedModel, FleetRow
from omni_proxy.cli.client.worker_changes import WorkerAction
from omni_proxy.cli.screen.diagnosis import LEAVING, URGENCY, WELL, Diagnosis, diagnose

QUIT: Final = "quit"
MAX_SEARCH: Final = 60
WHEEL_ROWS: Final = 3
ACTION_KEYS: Final = {
    "d": WorkerAction.DISABLE, "e": WorkerAction.ENABLE,
    "D": WorkerAction.DRAIN, "v": WorkerAction.REVIVE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PendingAction:
    """A change of one worker, which is confirmed or about to be."""

    action: WorkerAction
    worker_id: str
    worker_name: str


@dataclass(frozen=True, slots=True)
class Click:
    """A click of the left button; column and line count from 0."""

    column: int
    line: int


# Column, sort key, and whether descending; None always sorts last.
_Key = Callable[[FleetRow, Diagnosis], Any]
ORDERS: Final[tuple[tuple[str, _Key, bool], ...]] = (
    ("", lambda row, verdict: (URGENCY[verdict.kind], -row.in_flight), False),
    ("WORKER", lambda row, _: row.name, False),
    ("STATE", lambda _, verdict: verdict.state, False),
    ("BUSY", lambda row, _: row.in_flight, True),
    ("SESS", lambda row, _: row.sessions, True),
    ("REQ/S", lambda row, _: row.rate, True),
    ("P50", lambda row, _: row.first_p50_ms, True),
    ("P99", lambda row, _: row.first_p99_ms, True),
    ("ERR", lambda row, _: row.errors, True),
    ("WEIGHTS", lambda row, _: row.weight_version, False),
)


@dataclass(slots=True)
class TopView:
    """Changed by `show` and `press` only."""

    feed: FeedModel | None = None
    verdicts: dict[str, Diagnosis] = field(default_factory=dict)
    rows: list[FleetRow] = field(default_factory=list)  # in the order in which they are shown
    selected: str = ""
    first: int = 0  # the row on top of the screen
    page_rows: int = 1  # rows that fit on the screen; set by the drawing code
    title: str = ""  # the table's title and its line, as drawn
    title_line: int = 0
    help_open: bool = False
    search: str = ""  # show only rows that contain this text
    typing: bool = False  # keys go into `search`
    order: int = 0
    reversed: bool = False
    problems_only: bool = False
    pending: PendingAction | None = None
    message: str = ""
    unlimited_width: bool = False  # lines may be wider than the screen: for a pipe

    def show(self, feed: FeedModel) -> None:
        self.feed = feed
        self.verdicts = diagnose(feed)
        self._arrange()

    def press(self, key: str | Click) -> str | PendingAction | None:
        """`QUIT`, a change that was confirmed, or None."""
        if self.pending is not None:
            return self._confirm(key)
        if key == "ctrl-c":
            return QUIT
        if self.help_open:  # any key closes it
            self.help_open = False
        elif isinstance(key, Click):
            self._click(key)
        elif self.typing and self._type(key):
            pass
        elif key == "q":
            return QUIT
        else:
            self.message = ""
            self._handle_key(key)
        return None

    def _handle_key(self, key: str) -> None:
        if key in ACTION_KEYS:
            self._ask(ACTION_KEYS[key])
        elif key in _STEPS:
            self._move(_STEPS[key])
        elif key in _PAGES:
            self._move(_PAGES[key] * self.page_rows)
        elif key in _ORDER_STEPS:
            self._sort_by((self.order + _ORDER_STEPS[key]) % len(ORDERS))
        elif key == "r":
            self._reverse()
        elif key == "o":
            self.problems_only = not self.problems_only
            self._select_first()
        elif key == "?":
            self.help_open = True
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self._search_for("")

    @property
    def index(self) -> int:
        """The index of the selected row; 0 if there is none."""
        return next((index for index, row in enumerate(self.rows) if row.id == self.selected), 0)

    @property
    def row(self) -> FleetRow | None:
        return self.rows[self.index] if self.rows else None

    def set_page_rows(self, room: int) -> None:
        """Set how many rows fit, and scroll until the selected one is visible."""
        self.page_rows = max(1, room)
        lowest = max(0, len(self.rows) - self.page_rows)
        self.first = min(max(self.first, self.index - self.page_rows + 1), self.index, lowest)

    def _type(self, key: str) -> bool:
        """Handle a key typed into the search. Returns False if the key is for the list."""
        if key in ("enter", "escape"):
            self.typing = False
            if key == "escape":
                self._search_for("")
        elif key == "backspace":
            if not self.search:
                self.typing = False
            self._search_for(self.search[:-1])
        elif len(key) == 1 or key == "space":
            self._search_for((self.search + (" " if key == "space" else key))[:MAX_SEARCH])
        else:
            return False
        return True

    def _search_for(self, text: str) -> None:
        if text != self.search:
            self.search = text
            self._arrange()

    def _click(self, click: Click) -> None:
        """On a row: select it. On a column's title: sort by it, the second time in reverse."""
        index = self.first + click.line - self.title_line - 1
        if click.line == self.title_line and (order := self._order_at(click.column)) is not None:
            if order == self.order:
                self._reverse()
            else:
                self._sort_by(order)
        elif self.first <= index < min(len(self.rows), self.first + self.page_rows):
            self.selected = self.rows[index].id

    def _order_at(self, column: int) -> int | None:
        for word in re.finditer(r"\S+", self.title):
            name = word[0].rstrip("▼▲")
            if word.start() <= column < word.end():
                return next((index for index, order in enumerate(ORDERS) if order[0] == name), None)
        return None

    def _sort_by(self, order: int) -> None:
        self.order = order
        self.reversed = False
        self._select_first()

    def _reverse(self) -> None:
        self.reversed = not self.reversed
        self._select_first()

    def _confirm(self, key: str | Click) -> PendingAction | None:
        pending, self.pending = self.pending, None
        if key in ("y", "Y") and pending is not None:
            self.message = f"{pending.action} {pending.worker_name} …"
            return pending
        self.message = "cancelled"
        return None

    def _ask(self, action: WorkerAction) -> None:
        row = self.row
        if row is None:
            self.message = "no worker is selected"
        else:
            self.pending = PendingAction(action, row.id, row.name)

    def _move(self, by: int) -> None:
        if self.rows:
            index = min(max(0, self.index + by), len(self.rows) - 1)
            self.selected = self.rows[index].id

    def _select_first(self) -> None:
        """Rearrange the rows after a change of the order, and select the first one."""
        self._arrange()
        self.selected = self.rows[0].id if self.rows else ""

    def _arrange(self) -> None:
        """Sort the rows. If the selected worker has left, the row at its index is selected."""
        if self.feed is None:
            return
        index = self.index
        rows = [row for row in self.feed.fleet if self._is_shown(row)]
        _, key, greatest_first = ORDERS[self.order]
        keyed = [(key(row, self.verdicts[row.id]), row) for row in rows]
        sortable = [pair for pair in keyed if pair[0] is not None]
        # A stable order among equals, so that rows don't jump.
        sortable.sort(key=lambda pair: pair[1].url)
        sortable.sort(key=lambda pair: pair[0], reverse=greatest_first is not self.reversed)
        self.rows = [row for _, row in sortable] + [row for value, row in keyed if value is None]
        if self.rows and not any(row.id == self.selected for row in self.rows):
            self.selected = self.rows[min(index, len(self.rows) - 1)].id

    def _is_shown(self, row: FleetRow) -> bool:
        if self.problems_only and not self._has_problem(row):
            return False
        state = self.verdicts[row.id].state
        texts = (row.url, row.name, row.model, row.role, state, row.weight_version)
        wanted = self.search.casefold()
        return any(wanted in text.casefold() for text in texts if text)

    def _has_problem(self, row: FleetRow) -> bool:
        return self.verdicts[row.id].kind not in (WELL, LEAVING)


_FAR: Final = 1 << 30
_STEPS: Final = {
    "up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR,
    "wheelup": -WHEEL_ROWS, "wheeldown": WHEEL_ROWS,
}  # fmt: skip
_PAGES: Final = {"pageup": -1, "pagedown": 1, "space": 1}
_ORDER_STEPS: Final = {"left": -1, "<": -1, "right": 1, ">": 1}
