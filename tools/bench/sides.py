"""What may stand between the load and the worker: omni-proxy, a peer, or nothing at all."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

OMNI_PROXY = f"{shlex.quote(sys.executable)} -m omni_proxy --config {{config}}"

# One thread, connections kept on both sides and, above all, http-no-delay: without it HAProxy sends
# events with MSG_MORE, the kernel holds them back for up to 200 ms, and the CPU per event is that
# of a proxy that sends a twentieth of the segments.
HAPROXY_CONFIG = """\
global
    nbthread 1
    maxconn 8192
defaults
    mode http
    option http-no-delay
    http-reuse always
    timeout connect 5s
    timeout client 75s
    timeout server 75s
frontend door
    bind 127.0.0.1:{port}
    default_backend fleet
backend fleet
    balance leastconn
{servers}
"""

OMNI_CONFIG = """\
[server]
host = "127.0.0.1"
port = {port}
state_file = "off"
access_log = "off"
log_level = "warning"
[routing]
policy = "least_request"
[health]
interval_secs = 600
success_threshold = 1
{workers}"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a side is started: its port, the worker's ports, a folder for its files."""

    port: int
    workers: Sequence[int]
    folder: Path


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    command: Callable[[Place], list[str]] | None  # None: the load goes straight to the worker


NOTHING = Side("worker alone", None)


def haproxy() -> Side | None:
    program = shutil.which("haproxy")
    if program is None:
        return None
    told = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
    version = told.split()[2].partition("-")[0]

    def command(place: Place) -> list[str]:
        servers = [f"    server w{n} 127.0.0.1:{port}" for n, port in enumerate(place.workers)]
        config = place.folder / "haproxy.cfg"
        config.write_text(HAPROXY_CONFIG.format(port=place.port, servers="\n".join(servers)))
        return [program, "-db", "-f", str(config)]

    return Side(f"haproxy {version}", command)


PEERS: dict[str, Callable[[], Side | None]] = {"haproxy": haproxy}


def proxy(template: str, name: str) -> Side:
    """A proxy started by a command line with {port}, {worker_urls} (one word each) or {config}."""
    words = shlex.split(template)
    if not any(place in word for place in ("{port}", "{config}") for word in words):
        raise ValueError("--proxy-command needs {port} or {config}, or nobody knows where it is")

    def command(place: Place) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in place.workers]
        config = place.folder / "omni-proxy.toml"
        entries = [f'[[workers]]\nurl = "{url}"\nmodel = "bench"\n' for url in urls]
        config.write_text(OMNI_CONFIG.format(port=place.port, workers="".join(entries)))
        argv: list[str] = []
        for word in words:
            if word == "{worker_urls}":
                argv += urls
            else:
                argv.append(
                    word.replace("{port}", str(place.port)).replace("{config}", str(config))
                )
        return argv

    return Side(name, command)
