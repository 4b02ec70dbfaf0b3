"""The measurements of the bench: each runs with the command line's arguments and prints tables.

A measurement returns the program's exit status: 1 if the results are not valid.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from tools.bench.data_plane import features as request_features
from tools.bench.data_plane import goals as promises
from tools.bench.data_plane import process_scaling, two_legs
from tools.bench.data_plane.admin_latency import admin_waits
from tools.bench.data_plane.header_fields import new_field
from tools.bench.data_plane.instructions import MODES
from tools.bench.data_plane.instructions import count as counted
from tools.bench.data_plane.profile import profile as profiled
from tools.bench.harness import report
from tools.bench.harness.load_run import LOADS, QUICK, LegError, Load
from tools.bench.harness.paired import Loads, measure
from tools.bench.harness.picture import picture
from tools.bench.harness.proxies import NOTHING, PEERS, Side, omni_command, proxy
from tools.bench.memory import connection_memory, request_memory

PROFILED = {"unary": "unary c=32", "stream": "stream 17k/s"}


def _loads(arguments: argparse.Namespace) -> list[Load]:
    several = arguments.what in ("all", "tls")
    kinds = ("unary", "stream") if several else (arguments.what,)
    chosen = [load for load in LOADS if load.mode in kinds]
    few = arguments.quick or arguments.what == "tls"
    return [load for load in chosen if load.name in QUICK] if few else chosen


def _ours(arguments: argparse.Namespace, *, secure: bool = False) -> Side:
    command = arguments.proxy_command or omni_command()
    return proxy(command, arguments.proxy_name, secure=secure)


def _peers(arguments: argparse.Namespace, *, secure: bool = False) -> list[Side]:
    """The installed peers; reports missing ones. Raises LegError if nothing else is measured."""
    if arguments.no_peer:
        return []
    made = {name: PEERS[name](secure=secure) for name in arguments.peer}
    for name, peer in made.items():
        if peer is None:
            print(f"bench: {name} is not installed and is skipped", file=sys.stderr)
    found = [peer for peer in made.values() if peer is not None]
    if not found and (arguments.peer_only or arguments.self_check):
        raise LegError(f"{arguments.peer[0]} is not installed, so there is nothing to measure")
    return found


def _sides(arguments: argparse.Namespace) -> tuple[Side | None, list[Side]]:
    """The measured side, and the sides that it is compared with."""
    secure = arguments.what == "tls"
    peers = _peers(arguments, secure=secure)
    if arguments.peer_only:
        return None, peers
    if arguments.self_check:
        return replace(peers[0], name=f"{peers[0].name} again"), peers[:1]
    return _ours(arguments, secure=secure), peers


def paired(arguments: argparse.Namespace) -> int:
    ours, peers = _sides(arguments)
    facts = report.machine()
    sides = [*peers, *([ours] if ours else [])]
    loads = measure(sides, _loads(arguments), arguments.rounds, arguments.secs)
    names = [peer.name for peer in peers]
    _print_facts(facts)
    if not peers:
        print("no peer: none is installed or wanted, so there are no ratios")
    print("\nCPU of the proxy's processes, us per request or event, and ratios within a round:")
    print("\n".join(report.cpu_table(loads, ours.name if ours else None, names)))
    if added := report.added_table(loads, [side.name for side in sides], NOTHING.name):
        print("\nAdded to the median wait of the worker alone, us", *added, sep="\n")
    print("\nWhat the load saw, medians")
    print("\n".join(report.seen_table(loads)))
    if ours and arguments.svg:
        groups = [promises.group(name, loads, [side.name for side in sides]) for name in loads]
        arguments.svg.write_text(picture(*_titles(facts), groups))
    if arguments.json:
        _write(arguments.json, facts, loads, (ours.name if ours else None, names))
    return _faulty(report.faults(loads))


def legs(arguments: argparse.Namespace) -> int:
    """Requests in two legs, compared with plain ones."""
    sides = two_legs.sides(_ours(arguments), arguments.peer)
    return _by_the_first(arguments, sides, f" (goal: at most {two_legs.GOAL})")


def features(arguments: argparse.Namespace) -> int:
    """Metrics, keys and traces: on compared with off."""
    with request_features.running_collector() as collector:
        return _by_the_first(arguments, request_features.sides(_ours(arguments), collector))


def ranks(arguments: argparse.Namespace) -> int:
    """Aliases, ranks and keys of workers, compared with workers without."""
    return _by_the_first(arguments, request_features.fleet_sides(_ours(arguments)))


def _by_the_first(arguments: argparse.Namespace, sides: Sequence[Side], goal: str = "") -> int:
    """Small POSTs through each side, and its cost as a ratio to the first side's."""
    facts = report.machine()
    unary = [load for load in LOADS if load.name == PROFILED["unary"]]
    loads = measure(sides, unary, arguments.rounds, arguments.secs)
    plain = sides[0].name
    _print_facts(facts)
    print(f"\nCPU by that of {plain}, ratios within a round{goal}:")
    for rounds in loads.values():
        for side in sides:
            cost = report.spread(report.costs(rounds, side.name))
            ratio = report.spread(report.ratios(rounds, side.name, plain), 3)
            print(f"  {side.name:<40} {cost} us  {ratio}")
    if arguments.json:
        _write(arguments.json, facts, loads, (None, [side.name for side in sides]))
    return _faulty(report.faults(loads))


def _print_facts(facts: dict[str, str]) -> None:
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))


def _titles(facts: dict[str, str]) -> tuple[str, str]:
    machine = f"{facts['date'][:10]}, {facts['cpu']}, load average {facts['load_average']}"
    return "What omni-proxy costs, shorter is better", f"Medians of paired runs; {machine}"


def _faulty(faults: list[str]) -> int:
    if faults:
        print("\n".join(["", "ERRORS: these results are not valid", *faults]))
    return 1 if faults else 0


def _write(
    file: Path,
    facts: dict[str, str],
    loads: Loads,
    names: tuple[str | None, Sequence[str]],
    more: dict[str, object] | None = None,
) -> None:
    """Write the results as JSON; `names` are the proxy's and the peers'."""
    ours, peers = names
    found = {
        load: {
            peer: median(within)
            for peer in peers
            if (within := report.ratios(rounds, ours or "", peer))
        }
        for load, rounds in loads.items()
    }
    legs = {
        load: [{side: asdict(leg) for side, leg in legs.items()} for legs in rounds]
        for load, rounds in loads.items()
    }
    kept = {"machine": facts, "ratios": found, **(more or {}), "rounds": legs}
    file.write_text(json.dumps(kept, indent=1) + "\n")


def goals(arguments: argparse.Namespace) -> int:
    command = arguments.proxy_command or omni_command()
    secs = min(arguments.secs, 2.0) if arguments.quick else arguments.secs
    facts = report.machine()
    how = promises.Measuring(command, arguments.proxy_name, arguments.rounds, secs)
    found = promises.measure_goals(how)
    facts["load_average"] += f" before, {report.machine()['load_average']} after"
    _print_facts(facts)
    print(f"{arguments.rounds} rounds of {secs:g} s\n")
    print("\n".join(promises.table(found)))
    if arguments.svg:
        arguments.svg.write_text(picture(*_titles(facts), found.groups))
    if arguments.json:
        sides = {side for rounds in found.loads.values() for legs in rounds for side in legs}
        peers = sorted(sides - {arguments.proxy_name, NOTHING.name})
        _write(
            arguments.json, facts, found.loads, (arguments.proxy_name, peers), {"more": found.facts}
        )
    return _faulty(found.faults)


def instructions(arguments: argparse.Namespace) -> int:
    """Instructions of this checkout's version."""
    counts = {mode: counted(mode) for mode in MODES}
    _print_facts(report.machine())
    print("\ninstructions of the data plane in user space")
    rows = [["per small POST", f"{counts['unary']:,.0f}"]]
    rows.append(["per streamed event", f"{counts['stream']:,.0f}"])
    print("\n".join(report.columns(rows)))
    return 0


def memory(arguments: argparse.Namespace) -> int:
    ours = [] if arguments.peer_only else [_ours(arguments)]
    found = connection_memory.measure_groups([*_peers(arguments), *ours])
    _print_facts(report.machine())
    print("\nresident memory of a connection")
    print("\n".join(report.columns(connection_memory.table(found))))
    for side in ours:
        print("\nresident memory of waiting requests, by their bytes")
        print("\n".join(report.columns(request_memory.table(side))))
    return 0


def admin(arguments: argparse.Namespace) -> int:
    waits = admin_waits(_ours(arguments), max(arguments.secs, promises.ADMIN_SECS))
    _print_facts(report.machine())
    print(f"\nGET /workers of {waits.side}, {waits.count} times beside 32 busy clients, ms")
    rows = [
        ["", "p50", "p99"],
        ["busy", f"{waits.p50_ms:.1f}", f"{waits.p99_ms:.1f}"],
        ["idle", f"{waits.idle_p50_ms:.1f}", f"{waits.idle_p99_ms:.1f}"],
    ]
    print("\n".join(report.columns(rows)))
    return 0


def fields(arguments: argparse.Namespace) -> int:
    costs = new_field(_ours(arguments), arguments.rounds, arguments.secs)
    _print_facts(report.machine())
    print("\nCPU per small POST of 32 clients, us: median (lowest..highest)")
    rows = [
        ["with a field that is new in each", report.spread(costs.with_field)],
        ["without", report.spread(costs.without)],
        ["ratio within a round", report.spread(costs.ratios, 2)],
    ]
    print("\n".join(report.columns(rows)))
    return _faulty(costs.faults)


def processes(arguments: argparse.Namespace) -> int:
    both = process_scaling.measure_scaling(
        _ours(arguments), promises.PROCESSES, arguments.rounds, arguments.secs
    )
    _print_facts(report.machine())
    print(f"\nrequests a second: median (lowest..highest); {process_scaling.cores()} cores for all")
    rows = [
        [f"{both.processes} processes", report.spread(both.many_per_sec, 0)],
        ["1 process", report.spread(both.one_per_sec, 0)],
        ["ratio within a round", report.spread(both.ratios, 2)],
    ]
    print("\n".join(report.columns(rows)))
    return 0


def profile(arguments: argparse.Namespace) -> int:
    wanted = PROFILED[arguments.profiled or "unary"]
    load = next(load for load in LOADS if load.name == wanted)
    print("\n".join(profiled(_ours(arguments), load, max(arguments.secs, 1.0))))
    return 0
