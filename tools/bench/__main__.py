"""python -m tools.bench: the command line of the bench."""

import argparse
import sys
from pathlib import Path

from tools.bench.data_plane import failed_legs, measurements
from tools.bench.harness.build import BuildError, build
from tools.bench.harness.load_run import QUICK, LegError
from tools.bench.harness.peers import NotInstalled
from tools.bench.harness.processes import end_on_signals, raise_descriptor_limit
from tools.bench.harness.proxies import PEERS
from tools.bench.harness.tls import NoTools

CPU_BENCHES = ("unary", "stream", "all", "tls")
WHAT = """\
what is measured:
  unary, stream, all  CPU per request and per streamed event, and latency, compared with peers
  tls                 the same with TLS listeners
  memory              bytes per connection, of 10,000 idle ones and of 2,000 slow streams
  fields              a header field that is new in every request, compared with none
  admin               the latency of GET /workers while 32 clients are busy
  processes           requests per second of two data-plane processes, compared with one
  legs                requests over prefill and decode workers, compared with plain ones
  failures            the time until a client gets the error of a failed leg
  features            metrics, callers' keys and traces, each compared with none
  ranks               aliases, ranks and keys of workers, each compared with none
  goals               all of these in one run, compared with the goals
  instructions        instructions in user space per request and event, with valgrind
  profile             the proxy's time by line and function (profile unary, profile stream)

`python -m tools.bench --replica` measures the replica, `--weights` the delivery of new weights to
a fleet, `--discovery` how long changes of pods block the event loop, `--envoy` Envoy with the
picker, Envoy alone and omni-proxy, `python -m tools.bench.policies` policies, large fleets and
metrics.
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        epilog=WHAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = [
        *CPU_BENCHES,
        "memory",
        "fields",
        "admin",
        "processes",
        "legs",
        "failures",
        "features",
        "ranks",
        "goals",
        "instructions",
        "profile",
    ]
    parser.add_argument("what", choices=kinds)
    parser.add_argument(
        "profiled",
        nargs="?",
        choices=list(measurements.PROFILED),
        help="the load of profile (unary)",
    )
    quick = f"3 rounds, and only the loads {' and '.join(QUICK)}"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--rounds", type=int, choices=range(1, 31), metavar="1..30", help="5")
    parser.add_argument("--secs", type=float, default=4.0, help="measured per leg, 0.5 to 30 (4)")
    parser.add_argument(
        "--peer", choices=list(PEERS), action="append",
        help="may be repeated (haproxy); routers are installed on first use",
    )  # fmt: skip
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--peer-only", action="store_true", help="measure only the peers")
    only.add_argument("--no-peer", action="store_true", help="measure only the proxy")
    only.add_argument(
        "--self-check",
        action="store_true",
        help="measure the peer against itself: the accuracy of ratios",
    )
    parser.add_argument("--proxy-command", metavar="COMMAND", help="instead of omni-proxy")
    parser.add_argument("--proxy-name", default="omni-proxy", metavar="NAME", help="in the tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all legs to FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a chart (goals, all)")
    arguments = parser.parse_args()
    if arguments.what != "profile" and arguments.profiled is not None:
        parser.error(f"{arguments.what} takes no further argument; only profile takes a load")
    if not 0.5 <= arguments.secs <= 30:
        parser.error("--secs: 0.5 to 30")
    arguments.peer = list(dict.fromkeys(arguments.peer or ["haproxy"]))
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 5)
    return arguments


def _replica(argv: list[str]) -> int:
    from tools.bench.replica import main as replica

    return replica(argv)


def _weights(argv: list[str]) -> int:
    from tools.bench.weights import main as weights

    return weights(argv)


def _discovery(argv: list[str]) -> int:
    from tools.bench.discovery.pod_churn import main as discovery

    return discovery(argv)


def _envoy(argv: list[str]) -> int:
    from tools.bench.envoy_picker import main as envoy_picker

    return envoy_picker(argv)


# Other benches, each with its own arguments.
OTHERS = {
    "--envoy": _envoy,
    "--replica": _replica,
    "--weights": _weights,
    "--discovery": _discovery,
}
KINDS = {
    **dict.fromkeys(CPU_BENCHES, measurements.paired),
    "memory": measurements.memory,
    "fields": measurements.fields,
    "admin": measurements.admin,
    "processes": measurements.processes,
    "legs": measurements.legs,
    "failures": failed_legs.run,
    "features": measurements.features,
    "ranks": measurements.ranks,
    "goals": measurements.goals,
    "instructions": measurements.instructions,
    "profile": measurements.profile,
}


def main() -> int:
    for word, main_of in OTHERS.items():
        if word in sys.argv[1:]:
            return main_of([each for each in sys.argv[1:] if each != word])
    arguments = _arguments()
    end_on_signals()
    raise_descriptor_limit()
    try:
        build("fake_worker"), build("load_generator")
        return KINDS[arguments.what](arguments)
    except (BuildError, LegError, NoTools, NotInstalled, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
