"""Draws bar charts as SVG, for light and dark pages; uses only the standard library."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 920
NAME_WIDTH = 230
BAR_WIDTH = 470
ROW = 24
GROUP_GAP = 26
TOP = 76
STYLE = """\
    text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
    text { fill: #1f2933 }
    .title { font-size: 17px; font-weight: 600 }
    .group { font-weight: 600 }
    .note { font-size: 12px; fill: #6b7683 }
    .name { text-anchor: end }
    .peer { fill: #aab4bf }
    .ours { fill: #12817a }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e9ee }
      .note { fill: #97a1ad }
      .peer { fill: #5b6672 }
      .ours { fill: #35b3a6 }
    }"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar; `note` is shown after its value."""

    name: str
    value: float
    note: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Bars with the same unit; the longest one has the full width."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def picture(title: str, note: str, groups: Sequence[Group]) -> str:
    """A complete SVG file, in which shorter bars are better."""
    lines, y = [], TOP
    for group in groups:
        lines.append(f'  <text class="group" x="20" y="{y}">{escape(group.title)}</text>')
        longest = max((bar.value for bar in group.bars), default=0.0) or 1.0
        for bar in group.bars:
            y += ROW
            lines += _bar(bar, y, longest, group.unit)
        y += ROW + GROUP_GAP
    height = y - GROUP_GAP + 10
    description = "; ".join(f"{group.title}: {_described(group)}" for group in groups)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            ' aria-labelledby="title desc">',
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="desc">{escape(description)}</desc>',
            f"  <style>\n{STYLE}\n  </style>",
            f'  <text class="title" x="20" y="26">{escape(title)}</text>',
            f'  <text class="note" x="20" y="44">{escape(note)}</text>',
            *lines,
            "</svg>\n",
        ]
    )


def _bar(bar: Bar, y: int, longest: float, unit: str) -> list[str]:
    long = max(1.0, BAR_WIDTH * bar.value / longest)
    kind = "ours" if bar.ours else "peer"
    figure = f"{_number(bar.value)} {unit}" + (f"  {bar.note}" if bar.note else "")
    return [
        f'  <text class="name" x="{NAME_WIDTH - 10}" y="{y}">{escape(bar.name)}</text>',
        f'  <rect class="{kind}" x="{NAME_WIDTH}" y="{y - 12}" width="{long:.0f}" height="15"'
        ' rx="2"/>',
        f'  <text x="{NAME_WIDTH + long + 8:.0f}" y="{y}">{escape(figure)}</text>',
    ]


def _described(group: Group) -> str:
    return ", ".join(f"{bar.name} {_number(bar.value)} {group.unit}" for bar in group.bars)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
