"""`omni-proxy launch`: replicas and the proxy in front of them, from one command line.

`omni-proxy launch-router` is the same without replicas. Contract: both take the flags of
sglang-router and have its defaults (routers.md 4 and 5); other flags go to the engine.
"""

import os
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from typing import Final

from omni_proxy.cli.flags.arguments import launch_parser
from omni_proxy.cli.flags.engines import (
    ENGINES,
    EngineCommandError,
    EngineRequest,
    engine_capabilities,
    engine_command,
    engine_for,
    model_name,
)
from omni_proxy.cli.flags.peer_flags import router_flags_in
from omni_proxy.cli.serve import routed, router_startup, start
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import CAPABILITIES, LaunchEntry
from omni_proxy.launch.replica_process import visible_gpus

LAST_PORT: Final = 65535
VLLM_SHORT: Final = {"-dp": "--dp-size", "-tp": "--tp-size"}


def main(argv: Sequence[str]) -> int:
    parser = launch_parser(tuple(ENGINES))
    arguments, engine_flags = parser.parse_known_args(argv)
    if arguments.engine == "vllm" and (longer := _spelled_out(argv)) != list(argv):
        argv = longer
        arguments, engine_flags = parser.parse_known_args(argv)
    separator = argv.index("--") if "--" in argv else len(argv)
    if mistaken := router_flags_in([arg for arg in engine_flags if arg in argv[:separator]]):
        parser.error("unrecognized arguments: " + " ".join(mistaken))
    engine_flags = [arg for arg in engine_flags if arg != "--"]
    if engine_flags and arguments.command:
        parser.error(f"with --command, put {engine_flags[0]} into the command itself")
    try:
        entry = _entry(arguments, engine_flags)
        startup = routed(arguments, (entry,))
    except (ConfigError, EngineCommandError) as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return start(startup)


def _spelled_out(argv: Sequence[str]) -> list[str]:
    """argv with vLLM's short flags (-dp, -tp) expanded. They are not flags of the parser: other
    engines have one-letter flags with the same first letter."""
    separator = argv.index("--") if "--" in argv else len(argv)
    return [VLLM_SHORT.get(arg, arg) for arg in argv[:separator]] + list(argv[separator:])


def main_router(argv: Sequence[str]) -> int:
    """Starts without workers too: engines of a trainer register themselves later."""
    try:
        startup = router_startup(argv)
    except ConfigError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return start(startup)


def _entry(arguments: Namespace, engine_flags: Sequence[str]) -> LaunchEntry:
    """Raises EngineCommandError, with the remedy."""
    size = arguments.tensor_parallel_size
    request = EngineRequest(
        arguments.model_path, size, arguments.served_model_name, tuple(engine_flags)
    )
    engine = arguments.engine or engine_for(arguments.model_path)
    command = _words(arguments.command) if arguments.command else engine_command(engine, request)
    gpus = arguments.gpus_per_replica
    if gpus is None:
        gpus = size if visible_gpus(os.environ) and engine in ("sglang", "vllm", "omni") else 0
    return LaunchEntry(
        name="launch",
        command=command,
        replicas=arguments.data_parallel_size,
        host=arguments.worker_host,
        base_port=free_ports(
            arguments.worker_host, arguments.worker_base_port, arguments.data_parallel_size
        ),
        gpus_per_replica=gpus,
        ready_timeout_secs=arguments.worker_startup_timeout_secs,
        model="" if arguments.command else model_name(engine, request),
        capabilities=CAPABILITIES if arguments.command else engine_capabilities(engine, request),
    )


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise EngineCommandError(f"--command: {error} in {command!r}") from None


def free_ports(host: str, base: int, count: int) -> int:
    """The first port from `base` on that begins `count` free ones in a row. Raises
    EngineCommandError."""
    first = base
    while first + count - 1 <= LAST_PORT:
        in_use = [port for port in range(first, first + count) if not _is_free(host, port)]
        if not in_use:
            return first
        first = in_use[-1] + 1
    raise EngineCommandError(
        f"no {count} free ports in a row on {host} from {base} on: end other programs, or name "
        "another --worker-base-port"
    )


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror):
                raise EngineCommandError(f"--worker-host {host}: {error.strerror}") from None
            return False
    return True
