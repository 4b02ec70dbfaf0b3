"""The sides between load and worker: omni-proxy, a peer, or none."""

import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tools.bench.harness.peers import VERSIONS, borrowed, proxy_python
from tools.bench.harness.tls import NoTools, make_pair

OMNI_PROXY = f"{shlex.quote(sys.executable)} -m omni_proxy --config {{config}}"
# Default settings, except for a policy that compares loads like ours, and no log line per request.
ROUTER_WORDS = ("--policy", "power_of_two", "--log-level", "warn")

# One thread, connections kept on both sides, and http-no-delay: without it HAProxy sends events
# with MSG_MORE, the kernel delays them for up to 200 ms, and the CPU per event is that of a proxy
# that sends a twentieth of the segments.
# strict-limits would refuse to start if there are fewer descriptors than twice maxconn, although
# idle clients need only one each.
HAPROXY_MAX_CONNECTIONS = 17000
HAPROXY_CONFIG = """\
global
    nbthread 1
    maxconn {max_connections}
    no strict-limits
defaults
    mode http
    option http-no-delay
    http-reuse always
    timeout connect 5s
    timeout client 75s
    timeout server 75s
frontend clients
    bind 127.0.0.1:{port}{tls}
    default_backend fleet
backend fleet
    balance leastconn
{servers}
"""

OMNI_FILE = "omni-proxy.toml"
OMNI_CONFIG = """\
[server]
host = "127.0.0.1"
port = {port}
state_file = "off"
access_log = "off"
log_level = "warning"
{tls}[routing]
policy = "least_request"
[health]
interval_secs = 600
success_threshold = 1
{workers}"""


@dataclass(frozen=True, slots=True)
class Place:
    """The parameters of starting a side: its port, the workers' ports, a folder for its files."""

    port: int
    workers: Sequence[int]
    folder: Path


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    command: Callable[[Place], list[str]] | None  # None: the load goes directly to the worker
    secure: bool = False  # listens with TLS
    max_workers: int | None = None  # None for all


NOTHING = Side("worker alone", None)


def haproxy(*, secure: bool = False) -> Side | None:
    program = shutil.which("haproxy")
    if program is None:
        return None
    reported = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
    version = reported.split()[2].partition("-")[0]

    def command(place: Place) -> list[str]:
        servers = [f"    server w{n} 127.0.0.1:{port}" for n, port in enumerate(place.workers)]
        config = place.folder / "haproxy.cfg"
        tls = ""
        if secure:
            both = place.folder / "both.pem"
            both.write_bytes(b"".join(file.read_bytes() for file in make_pair(place.folder)))
            tls = f" ssl crt {both}"
        text = HAPROXY_CONFIG.format(
            port=place.port,
            servers="\n".join(servers),
            tls=tls,
            max_connections=HAPROXY_MAX_CONNECTIONS,
        )
        config.write_text(text)
        return [program, "-db", "-f", str(config)]

    return Side(f"haproxy {version}{' TLS' if secure else ''}", command, secure)


def router_words(name: str) -> tuple[str, ...]:
    return (*ROUTER_WORDS[:-1], "warning") if name == "vllm-router" else ROUTER_WORDS


def router(name: str, *, secure: bool = False) -> Side:
    """One of the routers that are Python packages. Raises NotInstalled, NoTools."""
    if secure:
        raise NoTools(f"{name} is measured only without TLS; use haproxy")
    program = str(borrowed(name))

    def command(place: Place) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in place.workers]
        return [
            *(program, *(("launch",) if name != "vllm-router" else ())),
            *("--host", "127.0.0.1", "--port", str(place.port)),
            *("--worker-urls", *urls, *router_words(name)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ]

    return Side(f"{name} {VERSIONS[name]}", command)


PEERS: dict[str, Callable[..., Side | None]] = {
    "haproxy": haproxy,
    "sglang-router": partial(router, "sglang-router"),
    "smg": partial(router, "smg"),
    "vllm-router": partial(router, "vllm-router"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def omni_command() -> str:
    """The command line of omni-proxy, with an interpreter that has its packages.

    Raises NotInstalled.
    """
    return f"{shlex.quote(proxy_python())} -m omni_proxy --config {{config}}"


def reconfigured(inner: Side, name: str, change: Callable[[str], str]) -> Side:
    """omni-proxy under another name, with its configuration changed by `change`."""
    command = inner.command
    if command is None:
        raise ValueError(f"{inner.name} has no configuration")

    def changed(place: Place) -> list[str]:
        argv = command(place)
        config = place.folder / OMNI_FILE
        config.write_text(change(config.read_text()))
        return argv

    return replace(inner, name=name, command=changed)


def proxy(template: str, name: str, *, secure: bool = False) -> Side:
    """A proxy with a command line that has {port}, {worker_urls} (one word each) or {config}."""
    words = shlex.split(template)
    if not any(place in word for place in ("{port}", "{config}") for word in words):
        raise ValueError("--proxy-command needs {port} or {config}, to determine its address")

    def command(place: Place) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in place.workers]
        config = place.folder / OMNI_FILE
        entries = [f'[[workers]]\nurl = "{url}"\nmodel = "bench"\n' for url in urls]
        tls = ""
        if secure:
            cert, key = make_pair(place.folder)
            tls = f'tls_cert = "{cert}"\ntls_key = "{key}"\n'
        text = OMNI_CONFIG.format(port=place.port, workers="".join(entries), tls=tls)
        config.write_text(text)
        argv: list[str] = []
        for word in words:
            if word == "{worker_urls}":
                argv += urls
            else:
                argv.append(
                    word.replace("{port}", str(place.port)).replace("{config}", str(config))
                )
        return argv

    return Side(f"{name} TLS" if secure else name, command, secure)
