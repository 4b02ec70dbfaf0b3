"""Measures all cost goals of the proxy in one run, and compares results with goals.

If a part can't be measured on this machine (a missing peer, too few descriptors), its row has the
reason, and the other parts are still measured.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeAlias

from tools.bench import policies
from tools.bench.data_plane import process_scaling, two_legs
from tools.bench.data_plane.admin_latency import admin_waits
from tools.bench.data_plane.header_fields import new_field
from tools.bench.harness import report
from tools.bench.harness.load_run import LOADS, QUICK, LegError, Load, fake_worker
from tools.bench.harness.paired import Loads, measure
from tools.bench.harness.peers import NotInstalled
from tools.bench.harness.picture import Bar, Group
from tools.bench.harness.proxies import NOTHING, PEERS, Side, proxy
from tools.bench.harness.tls import NoTools
from tools.bench.memory import connection_memory, request_memory

ROUTER = "sglang-router"
PROCESSES = 2
ADMIN_SECS = 8.0
KIB = 1024
PAIRED = ("unary c=1", "unary c=32", "stream 17k/s", "stream 50k/s")
TITLES = {
    "unary c=1": "CPU per small POST, 1 connection",
    "unary c=32": "CPU per small POST, 32 connections",
    "stream 17k/s": "CPU per streamed event, 17,000 a second",
    "stream 50k/s": "CPU per streamed event, 50,000 a second",
}
UNMEASURED = (LegError, NoTools, NotInstalled)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; `met` is None if nothing was measured or there is no goal."""

    what: str
    found: str
    goal: str = ""
    aim: str = ""
    met: bool | None = None
    beside: str = ""

    def cells(self) -> list[str]:
        verdict = "-" if self.met is None else "yes" if self.met else "NO"
        return [self.what, self.found, self.goal, self.aim, verdict, self.beside]


@dataclass
class Found:
    """All results: `loads` and `faults` of the paired runs, `facts` of the others, for --json."""

    rows: list[Row] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    loads: Loads = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measuring:
    """The proxy to measure, and the number and length of rounds."""

    command: str
    name: str
    rounds: int
    secs: float

    def ours(self, *, secure: bool = False) -> Side:
        return proxy(self.command, self.name, secure=secure)


Part: TypeAlias = Callable[[Measuring, Found], None]


def all_parts() -> dict[str, Part]:
    """The measurements by name."""
    return {
        "CPU and latency beside peers": _paired,
        "TLS": _tls,
        "requests in two legs": _two_legs,
        "500 workers": _many_workers,
        "memory per connection": _memory,
        "memory of waiting requests": _waiting,
        f"{PROCESSES} processes": _processes,
        "control requests under load": _admin_latency,
        "a field that is new in each request": _new_field,
    }


def measure_goals(how: Measuring, parts: Mapping[str, Part] | None = None) -> Found:
    """`parts`: all by default, which takes minutes. Raises BuildError."""
    found = Found()
    for name, part in (all_parts() if parts is None else parts).items():
        print(f"{name}:", file=sys.stderr)
        try:
            part(how, found)
        except UNMEASURED as error:
            found.rows.append(Row(name, f"not measured: {_first_line(error)}"))
            print(f"bench: {error}", file=sys.stderr)
    return found


def table(found: Found) -> list[str]:
    head = ["what", "found: median (lowest..highest)", "goal", "aim", "met", "beside"]
    return report.columns([head, *(row.cells() for row in found.rows)])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _peer(name: str, found: Found) -> Side | None:
    """The peer; if it is not available, None, and a row with the reason is added."""
    try:
        peer = PEERS[name]()
    except UNMEASURED as error:
        peer, reason = None, _first_line(error)
    else:
        reason = "it is not installed"
    if peer is None:
        found.rows.append(Row(f"beside {name}", f"not measured: {reason}"))
    return peer


def _loads(names: Sequence[str]) -> list[Load]:
    return [load for load in LOADS if load.name in names]


def ratio_row(what: str, ratios: Sequence[float], goal: float, aim: float | None = None) -> Row:
    met = median(ratios) <= goal if ratios else None
    aimed = f"<= {aim}" if aim else ""
    return Row(what, report.spread(ratios, 2), f"<= {goal}", aimed, met)


def _paired(how: Measuring, found: Found) -> None:
    ours = how.ours()
    haproxy, router = (_peer(name, found) for name in ("haproxy", ROUTER))
    sides = [side for side in (haproxy, router, ours) if side is not None]
    loads = measure(sides, _loads(PAIRED), how.rounds, how.secs)
    found.loads |= loads
    found.faults += report.faults(loads)
    names = [side.name for side in sides]
    found.groups += [group(load, loads, names) for load in PAIRED]
    if haproxy is not None:
        for load, goal, aim in (
            ("unary c=32", 1.6, 1.4), ("stream 17k/s", 1.35, 1.2), ("stream 50k/s", 1.25, 1.1),
        ):  # fmt: skip
            ratios = report.ratios(loads[load], ours.name, haproxy.name)
            found.rows.append(ratio_row(f"{TITLES[load]}, by HAProxy", ratios, goal, aim))
    if router is not None:
        ratios = report.ratios(loads["unary c=32"], ours.name, router.name)
        found.rows.append(ratio_row(f"{TITLES['unary c=32']}, by {ROUTER}", ratios, 0.35))
    found.rows.append(_added(loads["unary c=1"], ours, haproxy, router))


def _added(
    rounds: Sequence[report.Round], ours: Side, haproxy: Side | None, router: Side | None
) -> Row:
    own = report.added_us(rounds, ours.name, NOTHING.name)
    others = {
        peer.name: report.added_us(rounds, peer.name, NOTHING.name)
        for peer in (haproxy, router)
        if peer is not None
    }
    beside = ", ".join(f"{name} {median(us):.0f} us" for name, us in others.items())
    theirs = others.get(router.name) if router is not None else None
    return Row(
        "p50 added at 1 connection", f"{report.spread(own, 0)} us", f"< {ROUTER}'s", "",
        median(own) < median(theirs) if theirs else None, beside,
    )  # fmt: skip


def group(load: str, loads: Loads, sides: Sequence[str]) -> Group:
    """A chart's bars, each with its ratio to the first side."""
    medians = {side: median(report.costs(loads[load], side) or [0.0]) for side in sides}
    bars = []
    for side in sides:
        ratios = report.ratios(loads[load], side, sides[0]) if side != sides[0] else []
        note = f"({median(ratios):.2f} x)" if ratios else ""
        bars.append(Bar(side, medians[side], note, ours=side == sides[-1]))
    return Group(TITLES.get(load, f"CPU, {load}"), "us", tuple(bars))


def _tls(how: Measuring, found: Found) -> None:
    peer = PEERS["haproxy"](secure=True)
    if peer is None:
        raise NoTools("HAProxy is not installed")
    ours = how.ours(secure=True)
    loads = measure([peer, ours], _loads(QUICK), how.rounds, how.secs)
    found.loads |= {f"{load}, TLS": rounds for load, rounds in loads.items()}
    found.faults += report.faults(loads)
    for load, rounds in loads.items():
        ratios = report.ratios(rounds, ours.name, peer.name)
        found.rows.append(
            Row(f"{TITLES[load]}, TLS, by HAProxy", report.spread(ratios, 2), "", "<= 1.5")
        )


def _two_legs(how: Measuring, found: Found) -> None:
    sides = two_legs.sides(how.ours())
    loads = measure(sides, _loads(["unary c=32"]), how.rounds, how.secs)
    found.loads |= {f"{load}, two legs": rounds for load, rounds in loads.items()}
    found.faults += report.faults(loads)
    plain = sides[0].name
    for rounds in loads.values():
        for side, connector in zip(sides[1:], two_legs.CONNECTORS, strict=True):
            what = f"CPU per small POST in two legs, {connector}, by a plain one"
            ratios = report.ratios(rounds, side.name, plain)
            found.rows.append(ratio_row(what, ratios, two_legs.GOAL))


def _many_workers(how: Measuring, found: Found) -> None:
    with fake_worker(policies.MANY) as ports:
        pair = policies.PAIRS["many"]
        # More rounds: the goal is closer to 1 than single rounds are to each other.
        ratios, faults = policies.rounds_of(pair, 3 * how.rounds, how.secs, ports)
    found.faults += faults
    found.rows.append(ratio_row(f"{policies.MANY} workers by {policies.FEW}, CPU", ratios, 1.15))


def _memory(how: Measuring, found: Found) -> None:
    ours, peer = how.ours(), PEERS["haproxy"]()
    sides = [side for side in (peer, ours) if side is not None]
    for kind, max_kib in ((connection_memory.IDLE, 4), (connection_memory.SLOW, 6)):
        ones = connection_memory.measure_groups(sides, [kind])
        own = ones[-1]
        what = f"memory per {kind.name}, of {own.count:,}"
        beside = ", ".join(f"{one.side} {one.each_bytes / KIB:.2f} KiB" for one in ones[:-1])
        met = own.each_bytes <= max_kib * KIB
        figure = f"{own.each_bytes / KIB:.2f} KiB"
        found.rows.append(Row(what, figure, f"<= {max_kib} KiB", "", met, beside))
        found.facts[what] = {one.side: one.each_bytes for one in ones}
        bars = [Bar(one.side, one.each_bytes / KIB, ours=one is own) for one in ones]
        found.groups.append(Group(what.capitalize(), "KiB", tuple(bars)))


def _waiting(how: Measuring, found: Found) -> None:
    for name, (count, body) in request_memory.BODIES.items():
        grown = request_memory.bytes_per_byte(how.ours(), count, body)
        what = f"memory per byte of waiting requests, {name}"
        found.rows.append(Row(what, f"{grown:.2f} bytes", "<= 4", "", grown <= 4))
        found.facts[what] = grown


def _processes(how: Measuring, found: Found) -> None:
    both = process_scaling.measure_scaling(how.ours(), PROCESSES, how.rounds, how.secs)
    allowed = process_scaling.cores_allow(PROCESSES)
    goal = 1.8 if allowed else 1.0
    aim = (
        "" if allowed else f">= 1.8 with {3 * PROCESSES} idle cores; here {process_scaling.cores()}"
    )
    per_sec = f"{median(both.many_per_sec):.0f} and {median(both.one_per_sec):.0f} a second"
    met = median(both.ratios) >= goal
    ratio = report.spread(both.ratios, 2)
    what = f"{PROCESSES} processes by 1, requests"
    found.rows.append(Row(what, ratio, f">= {goal}", aim, met, per_sec))
    found.facts[what] = both.ratios


def _admin_latency(how: Measuring, found: Found) -> None:
    waits = admin_waits(how.ours(), max(how.secs, ADMIN_SECS))
    beside = f"p50 {waits.p50_ms:.1f} ms; idle p99 {waits.idle_p99_ms:.1f} ms"
    what = "GET /workers beside 32 busy clients, p99"
    figure = f"{waits.p99_ms:.1f} ms"
    found.rows.append(Row(what, figure, "<= 50 ms", "", waits.p99_ms <= 50, beside))
    found.facts[what] = waits.p99_ms


def _new_field(how: Measuring, found: Found) -> None:
    # More rounds: the goal is closer to 1 than single rounds are to each other.
    costs = new_field(how.ours(), 3 * how.rounds, how.secs)
    found.faults += costs.faults
    what = "CPU per small POST with a field new in each, by without"
    row = ratio_row(what, costs.ratios, 1.05)
    beside = f"{median(costs.with_field):.1f} and {median(costs.without):.1f} us"
    found.rows.append(replace(row, beside=beside))
    found.facts[what] = costs.ratios
