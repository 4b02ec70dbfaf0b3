"""State of the screen: the order of the rows, the selected worker, the action to confirm.

PURE. Invariant: the selected worker stays selected while it is in the fleet, whatever its row; no
action is returned that the user has not confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from omni_proxy.cli.screen.diagnosis import LEAVING, URGENCY, WELL, Diagnosis, diagnose
from omni_proxy.cli.screen.feed_model import FeedModel, FleetRow

QUIT: Final = "quit"
# Key to action.
ACTIONS: Final = {"d": "disable", "e": "enable", "D": "drain", "v": "revive"}


@dataclass(frozen=True, slots=True)
class PendingAction:
    """A change of one worker; `name` as in `worker_changes.change_worker`."""

    name: str
    worker_id: str
    called: str


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
    order: int = 0
    reversed: bool = False
    trouble_only: bool = False
    pending: PendingAction | None = None
    message: str = ""

    def show(self, feed: FeedModel) -> None:
        self.feed = feed
        self.verdicts = diagnose(feed)
        self._arrange()

    def press(self, key: str) -> str | PendingAction | None:
        """`QUIT`, an action that was confirmed, or None."""
        if self.pending is not None:
            return self._confirm(key)
        if key in ("q", "ctrl-c"):
            return QUIT
        self.message = ""
        if key in ACTIONS:
            self._ask(ACTIONS[key])
        elif key in _STEPS:
            self._move(_STEPS[key])
        elif key in ("pageup", "pagedown"):
            self._move(-self.page_rows if key == "pageup" else self.page_rows)
        elif key in _ORDER_STEPS:
            self.order = (self.order + _ORDER_STEPS[key]) % len(ORDERS)
            self.reversed = False
            self._select_first()
        elif key == "r":
            self.reversed = not self.reversed
            self._select_first()
        elif key == "o":
            self.trouble_only = not self.trouble_only
            self._select_first()
        return None

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

    def _confirm(self, key: str) -> PendingAction | None:
        action, self.pending = self.pending, None
        if key in ("y", "Y") and action is not None:
            self.message = f"{action.name} {action.called} …"
            return action
        self.message = "cancelled"
        return None

    def _ask(self, name: str) -> None:
        row = self.row
        if row is None:
            self.message = "no worker is selected"
        else:
            self.pending = PendingAction(name, row.id, row.name)

    def _move(self, by: int) -> None:
        if self.rows:
            index = min(max(0, self.index + by), len(self.rows) - 1)
            self.selected = self.rows[index].id

    def _select_first(self) -> None:
        """After a change of the order: select the first row."""
        self._arrange()
        self.selected = self.rows[0].id if self.rows else ""

    def _arrange(self) -> None:
        """Sort the rows. If the selected worker has left, the row at its index is selected."""
        if self.feed is None:
            return
        index = self.index
        rows = [row for row in self.feed.fleet if not self.trouble_only or self._troubled(row)]
        _, key, greatest_first = ORDERS[self.order]
        keyed = [(key(row, self.verdicts[row.id]), row) for row in rows]
        sortable = [pair for pair in keyed if pair[0] is not None]
        # A stable order among equals, so that rows don't jump.
        sortable.sort(key=lambda pair: pair[1].url)
        sortable.sort(key=lambda pair: pair[0], reverse=greatest_first is not self.reversed)
        self.rows = [row for _, row in sortable] + [row for value, row in keyed if value is None]
        if self.rows and not any(row.id == self.selected for row in self.rows):
            self.selected = self.rows[min(index, len(self.rows) - 1)].id

    def _troubled(self, row: FleetRow) -> bool:
        return self.verdicts[row.id].kind not in (WELL, LEAVING)


_FAR: Final = 1 << 30
_STEPS: Final = {
    "up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR,
}  # fmt: skip
_ORDER_STEPS: Final = {"left": -1, "<": -1, "right": 1, ">": 1}
