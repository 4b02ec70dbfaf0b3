"""python -m tools.bench: the command line of the bench."""

import argparse
import json
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import FrameType

from tools.bench import report
from tools.bench.build import BuildError, build
from tools.bench.legs import LOADS, QUICK, Leg, LegError, Load, fake_worker, run_leg
from tools.bench.profile import profile
from tools.bench.secure import NoTools
from tools.bench.sides import NOTHING, OMNI_PROXY, PEERS, Side, proxy

PROFILED = {"unary": "unary c=32", "stream": "stream 17k/s"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        epilog="`python -m tools.bench --replica` measures the replica instead, and"
        " `python -m tools.bench --weights` what new weights cost on their way to a fleet.",
    )
    parser.add_argument("what", choices=["unary", "stream", "all", "tls", "profile"])
    parser.add_argument("profiled", nargs="?", choices=list(PROFILED), help="for profile: the load")
    parser.add_argument(
        "--quick", action="store_true", help=f"only {' and '.join(QUICK)}, 3 rounds"
    )
    parser.add_argument("--rounds", type=int, choices=range(1, 31), metavar="1..30", help="5")
    parser.add_argument("--secs", type=float, default=4.0, help="measured per leg, 0.5 to 30 (4)")
    parser.add_argument("--peer", choices=list(PEERS), default="haproxy")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--peer-only", action="store_true", help="measure the peer alone")
    only.add_argument("--no-peer", action="store_true", help="measure the proxy alone")
    only.add_argument(
        "--self-check", action="store_true", help="the peer against itself: what a ratio is worth"
    )
    parser.add_argument("--proxy-command", default=OMNI_PROXY, metavar="COMMAND")
    parser.add_argument("--proxy-name", default="omni-proxy", metavar="NAME", help="in the tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all legs, for later comparison")
    arguments = parser.parse_args()
    if (arguments.what == "profile") != (arguments.profiled is not None):
        parser.error("profile, and only profile, is followed by unary or stream")
    if not 0.5 <= arguments.secs <= 30:
        parser.error("--secs: 0.5 to 30")
    return arguments


def _loads(arguments: argparse.Namespace) -> list[Load]:
    several = arguments.what in ("all", "tls")
    kinds = ("unary", "stream") if several else (arguments.what,)
    chosen = [load for load in LOADS if load.mode in kinds]
    few = arguments.quick or arguments.what == "tls"
    return [load for load in chosen if load.name in QUICK] if few else chosen


def _round(sides: list[Side], load: Load, workers: list[int], secs: float) -> dict[str, Leg]:
    legs: dict[str, Leg] = {}
    for side in sides:
        leg = run_leg(side, load, workers, secs)
        legs[side.name] = leg
        cost = f"{leg.p50_us:.0f} us p50" if leg.cpu_us is None else f"{leg.cpu_us:.1f} us of CPU"
        print(f"  {load.name} through {side.name}: {cost}", file=sys.stderr)
    return legs


def _measure(arguments: argparse.Namespace, sides: list[Side]) -> dict[str, list[report.Round]]:
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    loads: dict[str, list[report.Round]] = {}
    with fake_worker() as workers:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            turn = sides if number % 2 == 0 else sides[::-1]
            for load in _loads(arguments):
                bare = [NOTHING] if load.also_bare else []
                legs = _round([*bare, *turn], load, workers, arguments.secs)
                loads.setdefault(load.name, []).append(legs)
    return loads


def _sides(arguments: argparse.Namespace) -> tuple[Side | None, Side | None]:
    """What is measured and what it is measured by."""
    secure = arguments.what == "tls"
    peer = None if arguments.no_peer else PEERS[arguments.peer](secure=secure)
    if peer is None and (arguments.peer_only or arguments.self_check):
        raise LegError(f"{arguments.peer} is not installed, so there is nothing to measure")
    if arguments.peer_only:
        return None, peer
    if arguments.self_check and peer is not None:
        return replace(peer, name=f"{peer.name} again"), peer
    return proxy(arguments.proxy_command, arguments.proxy_name, secure=secure), peer


def _bench(arguments: argparse.Namespace) -> int:
    ours, peer = _sides(arguments)
    facts = report.machine()
    loads = _measure(arguments, [side for side in (peer, ours) if side is not None])
    names = (ours.name if ours else None, peer.name if peer else None)
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    if peer is None:
        print(f"no peer: {arguments.peer} is not installed or not wanted, so there are no ratios")
    print("\nCPU of the proxy's processes, us per request or event: median (lowest..highest)")
    print("\n".join(report.cpu_table(loads, *names)))
    print("\nWhat the load saw, medians")
    print("\n".join(report.seen_table(loads)))
    if arguments.json:
        _write(arguments.json, facts, loads, names)
    if faults := report.faults(loads):
        print("\n".join(["", "ERRORS: these figures are worth nothing", *faults]))
    return 1 if faults else 0


def _write(
    file: Path,
    facts: dict[str, str],
    loads: dict[str, list[report.Round]],
    names: tuple[str | None, str | None],
) -> None:
    ours, peer = names
    found = {
        load: median(within)
        for load, rounds in loads.items()
        if ours and peer and (within := report.ratios(rounds, ours, peer))
    }
    legs = {
        load: [{side: asdict(leg) for side, leg in legs.items()} for legs in rounds]
        for load, rounds in loads.items()
    }
    file.write_text(
        json.dumps({"machine": facts, "ratios": found, "rounds": legs}, indent=1) + "\n"
    )


def _profile(arguments: argparse.Namespace) -> int:
    load = next(load for load in LOADS if load.name == PROFILED[arguments.profiled])
    side = proxy(arguments.proxy_command, arguments.proxy_name)
    print("\n".join(profile(side, load, max(arguments.secs, 1.0))))
    return 0


def _replica(argv: list[str]) -> int:
    from tools.bench.replica import main as replica

    return replica(argv)


def _weights(argv: list[str]) -> int:
    from tools.bench.weights import main as weights

    return weights(argv)


# Benches of something else, each with words of its own.
OTHERS = {"--replica": _replica, "--weights": _weights}


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    for word, main_of in OTHERS.items():
        if word in sys.argv[1:]:
            return main_of([each for each in sys.argv[1:] if each != word])
    arguments = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # so that what was started is ended
    try:
        build("worker"), build("load")
        return _profile(arguments) if arguments.what == "profile" else _bench(arguments)
    except (BuildError, LegError, NoTools, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
