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

HEAD: Final = ("WORKER", "ROLE", "STATE", "BUSY", "SESS", "REQ/S", "P50", "P99", "ERR", "WEIGHTS")
_RIGHT: Final = ("BUSY", "SESS", "REQ/S", "P50", "P99", "ERR")
# Columns dropped on a narrow screen, in this order.
_SPARE: Final = ("WEIGHTS", "P50", "REQ/S", "SESS", "BUSY", "P99", "ROLE")
_SESSIONS: Final = "SESS"  # dropped while there are none
_ROLE: Final = "ROLE"  # dropped while all workers are regular
_WEIGHTS_WIDTH: Final = 16
_LEAST_NAME: Final = 12


def fleet_table(
    rows: Sequence[FleetRow],
    verdicts: Mapping[str, Diagnosis],
    width: int,
    sort_column: str = "",
    sort_mark: str = "",
) -> list[str]:
    """A header line, then one per worker, at most `width` columns wide if possible.

    The title of `sort_column` gets `sort_mark`; this column is never dropped.
    """
    cells = [_cells(row, verdicts[row.id]) for row in rows]
    titles = list(HEAD)
    spare = [title for title in _SPARE if title != sort_column]
    empty = {
        _SESSIONS: not any(row.sessions for row in rows),
        _ROLE: all(row.role == "regular" for row in rows),
    }
    for title, is_empty in empty.items():
        if is_empty and sort_column != title:
            spare.remove(title)
            column = titles.index(title)
            for row_cells in (titles, *cells):
                del row_cells[column]
    right_aligned = [title + sort_mark if title == sort_column else title for title in _RIGHT]
    while True:
        head = [title + sort_mark if title == sort_column else title for title in titles]
        # Names may have any length: they get the width that the other columns leave.
        name_width = (
            width
            - 2
            - max(
                map(
                    display_width, render_table(head[1:], [row[1:] for row in cells], right_aligned)
                )
            )
        )
        if name_width >= _LEAST_NAME or not spare:
            break
        column = titles.index(spare.pop(0))
        for row in (titles, *cells):
            del row[column]
    for row in cells:
        row[0] = truncate_middle(row[0], max(_LEAST_NAME, name_width))
    return render_table(head, cells, right_aligned)


def _cells(row: FleetRow, verdict: Diagnosis) -> list[str]:
    return [
        printable(row.name),
        printable(row.role),
        verdict.state,
        f"{row.in_flight}/{row.max_inflight}" if row.max_inflight else str(row.in_flight),
        str(row.sessions),
        f"{row.rate:.1f}",
        format_millis(row.first_p50_ms),
        format_millis(row.first_p99_ms),
        str(row.errors),
        truncate(printable(row.weight_version or NOTHING), _WEIGHTS_WIDTH),
    ]
