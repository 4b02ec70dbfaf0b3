"""The fleet as a table: the same columns for `status` and `top`.

PURE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.cli.screen.diagnosis import Diagnosis
from omni_proxy.cli.screen.feed_model import FleetRow
from omni_proxy.cli.screen.text_table import (
    NOTHING,
    display_width,
    format_millis,
    printable,
    render_table,
    truncate,
    truncate_middle,
)

HEAD: Final = ("WORKER", "STATE", "BUSY", "REQ/S", "P50", "P99", "ERR", "WEIGHTS")
_RIGHT: Final = ("BUSY", "REQ/S", "P50", "P99", "ERR")
# Columns that a narrow screen does without, the first ones first.
_SPARE: Final = ("WEIGHTS", "P50", "REQ/S", "BUSY", "P99")
_WEIGHTS_WIDTH: Final = 16
_LEAST_NAME: Final = 12


def fleet_table(
    rows: Sequence[FleetRow],
    verdicts: Mapping[str, Diagnosis],
    width: int,
    marked: str = "",
    mark: str = "",
) -> list[str]:
    """A line for the head, then one per worker, as narrow as `width` columns where that can be.

    The title of the column `marked` gets the mark, and stays where others go for want of room.
    """
    told = [_cells(row, verdicts[row.id]) for row in rows]
    shown = list(HEAD)
    spare = [title for title in _SPARE if title != marked]
    right = [title + mark if title == marked else title for title in _RIGHT]
    while True:
        head = [title + mark if title == marked else title for title in shown]
        # Names may have any length: they get what the other columns leave.
        room = (
            width
            - 2
            - max(map(display_width, render_table(head[1:], [row[1:] for row in told], right)))
        )
        if room >= _LEAST_NAME or not spare:
            break
        at = shown.index(spare.pop(0))
        for row in (shown, *told):
            del row[at]
    for row in told:
        row[0] = truncate_middle(row[0], max(_LEAST_NAME, room))
    return render_table(head, told, right)


def _cells(row: FleetRow, verdict: Diagnosis) -> list[str]:
    return [
        printable(row.name),
        verdict.state,
        f"{row.in_flight}/{row.max_inflight}" if row.max_inflight else str(row.in_flight),
        f"{row.rate:.1f}",
        format_millis(row.first_p50_ms),
        format_millis(row.first_p99_ms),
        str(row.errors),
        truncate(printable(row.weight_version or NOTHING), _WEIGHTS_WIDTH),
    ]
