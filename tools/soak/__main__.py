"""python -m tools.soak: honest clients during attacks, reloads, kills and weight updates.

Starts the real program with four honest and seven hostile workers. 32 honest clients send requests
all the time; hostile clients attack in the middle part. Exit status 0 if all bounds held, else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import trio

from tools.soak import report
from tools.soak.clients import Client, Ledger
from tools.soak.fleet import Fleet, Usage, fleet_of
from tools.soak.operator import Operator, call

CLIENTS: Final = 32
IDLE_SHARE: Final = 0.1  # of the time, both before and after the attack
READY_SECS: Final = 30.0
STALLED: Final = "event_loop_stalled"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="total duration (30)")
    parser.add_argument("--processes", type=int, default=1, help="processes of the proxy (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    arguments = parser.parse_args()
    if not 0.5 <= arguments.minutes <= 600:
        parser.error("--minutes: 0.5 to 600")
    return arguments


class Sampler:
    """Samples the proxy's memory and descriptors once a second."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.peak_rss_bytes = self.peak_descriptors = 0

    def now(self) -> Usage:
        usage = self._fleet.usage()
        self.peak_rss_bytes = max(self.peak_rss_bytes, usage.rss_bytes)
        self.peak_descriptors = max(self.peak_descriptors, usage.descriptors)
        return usage

    async def run(self) -> None:
        while True:
            self.now()
            await trio.sleep(1)


async def _until_ready(fleet: Fleet, operator: Operator) -> None:
    with trio.fail_after(READY_SECS):
        while True:
            try:
                await call(fleet.port, "GET", "/live")
                break
            except OSError:
                await trio.sleep(0.1)
    await operator.until_whole()


async def _attackers(fleet: Fleet, secs: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.soak.hostile_clients", str(fleet.port), str(secs)]
    ended = await trio.run_process(command, capture_stdout=True, stderr=subprocess.STDOUT)
    reported: dict[str, Any] = json.loads(ended.stdout)
    return reported


def _print(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


async def soak(fleet: Fleet, minutes: float) -> list[report.Line]:
    ledger, stop = Ledger(), trio.Event()
    operator, sampler = Operator(fleet, ledger), Sampler(fleet)
    idle_secs = minutes * 60 * IDLE_SHARE
    attack_secs = minutes * 60 - 2 * idle_secs
    await _until_ready(fleet, operator)
    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(Client(number, fleet.port, ledger).run, stop)
        _print(f"no attacks for {idle_secs:.0f} s")
        await trio.sleep(idle_secs)
        start = sampler.now()
        nursery.start_soon(sampler.run)
        _print(f"attacks for {attack_secs:.0f} s")
        ledger.phase = "siege"
        attack, relief = await _run_attacks(fleet, operator, attack_secs)
        ledger.phase = "afterwards"
        _print(f"no attacks for {idle_secs:.0f} s")
        await operator.until_whole()
        await trio.sleep(idle_secs)
        end = sampler.now()
        stop.set()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    _, status = await call(fleet.port, "GET", "/status")
    exit_status = await fleet.end()
    return [
        *report.lines_of_times(ledger.times),
        report.Line("streams cut by a kill of their worker",
                    str(ledger.counts["streams cut by a kill"])),
        report.none_of("honest requests that failed", ledger.failures),
        report.Line("what the operator did", ", ".join(
            f"{count} {what}" for what, count in sorted(operator.done.items())
        )),
        report.none_of("operations that failed", operator.failures),
        report.Line("rounds of the attackers", f"{attack['rounds']} in {relief:.0f} s"),
        report.none_of("requests that should have been refused", attack["breaches"]),
        report.memory_line(start.rss_bytes, sampler.peak_rss_bytes, end.rss_bytes),
        report.descriptor_line(start.descriptors, sampler.peak_descriptors, end.descriptors),
        *_of_the_program(status, fleet.log.read_text(errors="replace"), exit_status),
    ]  # fmt: skip


async def _run_attacks(
    fleet: Fleet, operator: Operator, secs: float
) -> tuple[dict[str, Any], float]:
    began, stop = trio.current_time(), trio.Event()
    attack: dict[str, Any] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(operator.run, stop)
        attack = await _attackers(fleet, secs)
        stop.set()
    return attack, trio.current_time() - began


def _of_the_program(status: dict[str, Any], log: str, exit_status: int | None) -> list[report.Line]:
    watchdog = status["watchdog"]
    stalls = [line for line in log.splitlines() if STALLED in line]
    errors = [line for line in log.splitlines() if "Traceback" in line]
    return [
        report.none_of("stalls that the watchdog saw", stalls),
        report.Line("longest turn of its loop", f"{watchdog['longest_turn_ms']:.0f} ms"),
        report.none_of("tracebacks in its log", errors),
        report.Line("its exit status", str(exit_status), "0", exit_status == 0),
    ]


async def _run(arguments: argparse.Namespace) -> list[report.Line]:
    with tempfile.TemporaryDirectory() as folder:
        async with fleet_of(Path(folder), arguments.processes) as fleet:
            return await soak(fleet, arguments.minutes)


def main() -> int:
    arguments = _arguments()
    lines = trio.run(_run, arguments)
    print(report.shown(lines))
    if arguments.json:
        found = [
            {"what": line.what, "found": line.found, "bound": line.bound, "holds": line.holds}
            for line in lines
        ]
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
