"""What the person looks at: the order of the fleet, the chosen worker, the question under way.

PURE. Invariant: the chosen worker stays chosen while it is in the fleet, wherever it moves to;
nothing is wished for that was not asked for and confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from omni_proxy.cli.screen.diagnosis import LEAVING, URGENCY, WELL, Diagnosis, diagnose
from omni_proxy.cli.screen.feed_model import FeedModel, FleetRow

QUIT: Final = "quit"
# Key, then the change that it wishes for.
WISHES: Final = {"d": "disable", "e": "enable", "D": "drain", "v": "revive"}


@dataclass(frozen=True, slots=True)
class PendingAction:
    """A change of one worker; `name` as in `fleet_changes.change`."""

    name: str
    worker_id: str
    called: str


# What a column is sorted by, and whether the greatest comes first; None always comes last.
_Key = Callable[[FleetRow, Diagnosis], Any]
ORDERS: Final[tuple[tuple[str, _Key, bool], ...]] = (
    ("", lambda row, verdict: (URGENCY[verdict.kind], -row.in_flight), False),
    ("WORKER", lambda row, _: row.name, False),
    ("STATE", lambda _, verdict: verdict.state, False),
    ("BUSY", lambda row, _: row.in_flight, True),
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
    chosen: str = ""
    first: int = 0  # the row on top of the screen
    room: int = 1  # rows that fit; whoever draws says so
    order: int = 0
    turned: bool = False
    trouble_only: bool = False
    asking: PendingAction | None = None
    said: str = ""

    def show(self, feed: FeedModel) -> None:
        self.feed = feed
        self.verdicts = diagnose(feed)
        self._arrange()

    def press(self, key: str) -> str | PendingAction | None:
        """`QUIT`, a wish that was confirmed, or nothing to do."""
        if self.asking is not None:
            return self._answered(key)
        if key in ("q", "ctrl-c"):
            return QUIT
        self.said = ""
        if key in WISHES:
            self._ask(WISHES[key])
        elif key in _STEPS:
            self._move(_STEPS[key])
        elif key in ("pageup", "pagedown"):
            self._move(-self.room if key == "pageup" else self.room)
        elif key in _ORDER_STEPS:
            self.order = (self.order + _ORDER_STEPS[key]) % len(ORDERS)
            self.turned = False
            self._from_the_top()
        elif key == "r":
            self.turned = not self.turned
            self._from_the_top()
        elif key == "o":
            self.trouble_only = not self.trouble_only
            self._from_the_top()
        return None

    @property
    def at(self) -> int:
        """The place of the chosen one among the rows; 0 where there is none."""
        return next((at for at, row in enumerate(self.rows) if row.id == self.chosen), 0)

    @property
    def row(self) -> FleetRow | None:
        return self.rows[self.at] if self.rows else None

    def fit(self, room: int) -> None:
        """So many rows can be shown: scroll until the chosen one is among them."""
        self.room = max(1, room)
        lowest = max(0, len(self.rows) - self.room)
        self.first = min(max(self.first, self.at - self.room + 1), self.at, lowest)

    def _answered(self, key: str) -> PendingAction | None:
        wish, self.asking = self.asking, None
        if key in ("y", "Y") and wish is not None:
            self.said = f"{wish.name} {wish.called} …"
            return wish
        self.said = "nothing was changed"
        return None

    def _ask(self, name: str) -> None:
        row = self.row
        if row is None:
            self.said = "there is no worker to change"
        else:
            self.asking = PendingAction(name, row.id, row.name)

    def _move(self, by: int) -> None:
        if self.rows:
            at = min(max(0, self.at + by), len(self.rows) - 1)
            self.chosen = self.rows[at].id

    def _from_the_top(self) -> None:
        """Who asks for another order wants to see who is first in it."""
        self._arrange()
        self.chosen = self.rows[0].id if self.rows else ""

    def _arrange(self) -> None:
        """The rows anew. Who left the fleet leaves the choice to whoever stands in his place."""
        if self.feed is None:
            return
        place = self.at
        rows = [row for row in self.feed.fleet if not self.trouble_only or self._troubled(row)]
        _, key, greatest_first = ORDERS[self.order]
        known = [(key(row, self.verdicts[row.id]), row) for row in rows]
        told = [pair for pair in known if pair[0] is not None]
        # Equal ones keep an order of their own, so that rows don't dance.
        told.sort(key=lambda pair: pair[1].url)
        told.sort(key=lambda pair: pair[0], reverse=greatest_first is not self.turned)
        self.rows = [row for _, row in told] + [row for value, row in known if value is None]
        if self.rows and not any(row.id == self.chosen for row in self.rows):
            self.chosen = self.rows[min(place, len(self.rows) - 1)].id

    def _troubled(self, row: FleetRow) -> bool:
        return self.verdicts[row.id].kind not in (WELL, LEAVING)


_FAR: Final = 1 << 30
_STEPS: Final = {
    "up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR,
}  # fmt: skip
_ORDER_STEPS: Final = {"left": -1, "<": -1, "right": 1, ">": 1}
