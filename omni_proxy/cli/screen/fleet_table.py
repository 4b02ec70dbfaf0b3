"""The fleet as a table, with the same columns in `status` and `top`.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.cli.client.feed_model import FleetRow
from omni_proxy.cli.screen.diagnosis import Diagnosis
from omni_proxy.cli.terminal_text import (
    NOTHING,
    display_width,
    format_millis,
    printable,
    render_table,
    truncate,
    truncate_middle,
)

HEAD: Final = (
    "WORKER", "ROLE", "STATE", "BUSY", "SESS", "REQ/S", "P50", "P99", "GAP", "TOK/S", "CACHE",
    "ERR", "WEIGHTS",
)  # fmt: skip
_RIGHT: Final = ("BUSY", "SESS", "REQ/S", "P50", "P99", "GAP", "TOK/S", "CACHE", "ERR")
# Dropped, in this order, if no worker has a value or if the table is too wide.
_TOKENS: Final = ("GAP", "CACHE", "TOK/S")
# Columns dropped on a narrow screen, in this order.
_SPARE: Final = ("WEIGHTS", "P50", "REQ/S", "SESS", "BUSY", "P99", "ROLE")
_SESSIONS: Final = "SESS"  # dropped while there are none
_ROLE: Final = "ROLE"  # dropped while all workers are regular
_WEIGHTS_WIDTH: Final = 16
_MIN_NAME_WIDTH: Final = 12


def fleet_table(
    rows: Sequence[FleetRow],
    verdicts: Mapping[str, Diagnosis],
    width: int,
    sorting: tuple[str, str] = ("", ""),
    reserved: int = 0,
) -> list[str]:
    """A header line, then one per worker, at most `width` columns wide if possible.

    `sorting`: a column's title and the mark that it gets; this column is never dropped. `reserved`:
    terminal columns that token figures must leave free.
    """
    sort_column, sort_mark = sorting
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
            _drop(title, titles, cells)
    for title in _TOKENS:
        wide = max(map(display_width, render_table(titles, cells))) > width - reserved
        column = titles.index(title)
        if wide or all(row_cells[column] == NOTHING for row_cells in cells):
            _drop(title, titles, cells)
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
        if name_width >= _MIN_NAME_WIDTH or not spare:
            break
        _drop(spare.pop(0), titles, cells)
    for row in cells:
        row[0] = truncate_middle(row[0], max(_MIN_NAME_WIDTH, name_width))
    return render_table(head, cells, right_aligned)


def _drop(title: str, titles: list[str], cells: list[list[str]]) -> None:
    column = titles.index(title)
    for row in (titles, *cells):
        del row[column]


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
        format_millis(row.minute.between_p50_ms),
        NOTHING if (rate := row.minute.output_tokens_per_sec) is None else f"{rate:.0f}",
        NOTHING if (share := row.minute.cache_hit_ratio) is None else f"{share:.0%}",
        str(row.errors),
        truncate(printable(row.weight_version or NOTHING), _WEIGHTS_WIDTH),
    ]
