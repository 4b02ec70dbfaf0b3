"""`omni-proxy launch`: starts replicas and the proxy in front of them from one command line.

`omni-proxy launch-router` is the same without replicas. Contract: both take the flags of
sglang-router and have its defaults (note:routers 4 and 5); other flags go to the engine.
"""

import os
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from typing import Final, Literal, TypeAlias

from omni_proxy.cli.flags.engine_commands import (
    ENGINES,
    EngineCommandError,
    EngineRequest,
    PortsOverlapError,
    engine_capabilities,
    engine_command,
    engine_for,
    model_name,
    ports_apart,
    publishes,
)
from omni_proxy.cli.flags.other_router_flags import router_flags_in
from omni_proxy.cli.flags.start_parsers import launch_parser
from omni_proxy.cli.serve import routed, router_startup, start
from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.launch.gpu_allocator import visible_gpus
from omni_proxy.shared.origins import MAX_PORT

Role: TypeAlias = Literal["", "prefill", "decode"]
VLLM_SHORT: Final = {"-dp": "--dp-size", "-tp": "--tp-size"}


def main(argv: Sequence[str]) -> int:
    parser = launch_parser(tuple(ENGINES))
    arguments, engine_flags = parser.parse_known_args(argv)
    if arguments.engine == "vllm" and (longer := _expand_short_flags(argv)) != list(argv):
        argv = longer
        arguments, engine_flags = parser.parse_known_args(argv)
    separator = argv.index("--") if "--" in argv else len(argv)
    if mistaken := router_flags_in([arg for arg in engine_flags if arg in argv[:separator]]):
        parser.error("unrecognized arguments: " + " ".join(mistaken))
    engine_flags = [arg for arg in engine_flags if arg != "--"]
    if engine_flags and arguments.command:
        parser.error(f"with --command, put {engine_flags[0]} into the command itself")
    try:
        startup = routed(arguments, _entries(arguments, engine_flags))
    except (ConfigError, EngineCommandError) as error:
        print(error, file=sys.stderr)
        return 2
    return start(startup)


def _expand_short_flags(argv: Sequence[str]) -> list[str]:
    """argv with vLLM's short flags (-dp, -tp) expanded. They are not flags of the parser: other
    engines have one-letter flags with the same first letter."""
    separator = argv.index("--") if "--" in argv else len(argv)
    return [VLLM_SHORT.get(arg, arg) for arg in argv[:separator]] + list(argv[separator:])


def main_router(argv: Sequence[str]) -> int:
    """Starts without workers too: engines of a trainer register themselves later."""
    try:
        startup = router_startup(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return start(startup)


def _entries(arguments: Namespace, engine_flags: Sequence[str]) -> tuple[LaunchEntry, ...]:
    """One group of replicas, or one for each role. Raises EngineCommandError, with the remedy."""
    prefill, decode = arguments.prefill_replicas, arguments.decode_replicas
    if not prefill and not decode:
        if arguments.replica_connector:
            raise EngineCommandError("--kv-connector is for --prefill and --decode")
        count = arguments.data_parallel_size or 1
        return (_entry(arguments, engine_flags, count, arguments.worker_base_port),)
    if not (prefill and decode):
        raise EngineCommandError("--prefill and --decode need each other: pass a number for both")
    if arguments.data_parallel_size:
        raise EngineCommandError("--dp-size starts replicas without a role: leave it out")
    if arguments.command:
        raise EngineCommandError("--command has no role: write [[launch]] groups with a role")
    first = _entry(arguments, engine_flags, prefill, arguments.worker_base_port, "prefill")
    return first, _entry(arguments, engine_flags, decode, first.base_port + prefill, "decode")


def _entry(
    arguments: Namespace, engine_flags: Sequence[str], count: int, base_port: int, role: Role = ""
) -> LaunchEntry:
    """Raises EngineCommandError, with the remedy."""
    size, connector = arguments.tensor_parallel_size, arguments.replica_connector
    before = arguments.prefill_replicas if role == "decode" else 0
    try:
        flags = ports_apart(engine_flags, before, count)
    except PortsOverlapError as error:
        raise EngineCommandError(str(error)) from None
    request = EngineRequest(
        arguments.model_path,
        size,
        arguments.served_model_name,
        flags,
        role,
        connector,
    )
    engine = arguments.engine or engine_for(arguments.model_path)
    command = _words(arguments.command) if arguments.command else engine_command(engine, request)
    gpus = arguments.gpus_per_replica
    if gpus is None:
        gpus = size if visible_gpus(os.environ) and engine in ("sglang", "vllm", "omni") else 0
    bootstrap_port = arguments.bootstrap_base_port
    if role == "prefill":
        bootstrap_port = free_ports(
            arguments.worker_host, bootstrap_port, count, "--bootstrap-base-port"
        )
    return LaunchEntry(
        name=role or "launch",
        command=command,
        replicas=count,
        host=arguments.worker_host,
        base_port=free_ports(arguments.worker_host, base_port, count, "--worker-base-port"),
        gpus_per_replica=gpus,
        ready_timeout_secs=arguments.worker_startup_timeout_secs,
        model="" if arguments.command else model_name(engine, request),
        role=role,
        kv_connector=connector if role else "",
        base_bootstrap_port=bootstrap_port,
        kv_events="auto" if publishes(flags) else "off",
        capabilities=CAPABILITIES if arguments.command else engine_capabilities(engine, request),
    )


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise EngineCommandError(f"--command: {error} in {command!r}") from None


def free_ports(host: str, base: int, count: int, flag: str = "--worker-base-port") -> int:
    """The first of `count` consecutive free ports, searched from `base`, the value of `flag`.

    Raises EngineCommandError.
    """
    first = base
    while first + count - 1 <= MAX_PORT:
        in_use = [port for port in range(first, first + count) if not _is_free(host, port)]
        if not in_use:
            return first
        first = in_use[-1] + 1
    raise EngineCommandError(
        f"no {count} free ports in a row on {host} from {base} on: end other programs, or pass "
        f"another {flag}"
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
