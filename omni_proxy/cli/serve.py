"""`omni-proxy [serve]`: runs the server with the settings of the command line; `launch-router` does
so with the defaults of sglang-router.

`omni-proxy picker` runs its policies without a relay, for Envoy and callers of POST /select: the
same program with one data-plane process, whose listener has control routes only. Exit status 2:
nothing ran.

This module does not read FILE; the server does, with the code that reloads it.
"""

import importlib.util
import os
import signal
import sys
import typing
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from omni_proxy.cli.flags.other_router_flags import overrides, warnings
from omni_proxy.cli.flags.start_parsers import (
    picker_parser,
    router_parser,
    serve_parser,
    short_help,
)
from omni_proxy.cli.frozen_binary import lead_process_group
from omni_proxy.config.configuration_flags import Dialect, Startup, parse_worker_urls, ranks_in_urls
from omni_proxy.config.fields import RetryCause
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.router_worker_flags import (
    DiscoveryFlags,
    PoolFlags,
    connector_of,
    discover_entries,
    pool_workers,
)
from omni_proxy.config.schema import LaunchEntry

# The defaults of sglang-router.
DEFAULTS: Final[dict[str, object]] = {
    "routing.policy": "cache_aware",
    # Its clients expect a retry on another worker after a transient failure, and distinguish busy
    # (429) from unavailable (503).
    "routing.retry_on": typing.get_args(RetryCause),
    "server.overload_status": 429,
}
# vllm-router differs in what identifies a session: a client sends the same `Authorization` in all
# of its sessions, and the id of a single request identifies no session.
VLLM_DEFAULTS: Final[dict[str, object]] = {
    "routing.session_headers": ("x-session-id", "x-user-id", "x-tenant-id"),
    "routing.session_body_keys": (
        "session_params.session_id", "user", "session_id", "user_id",
    ),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    if not argv:
        sys.stderr.write(short_help())
        return 2
    parser = serve_parser()
    arguments = parser.parse_args(argv)
    has_workers = arguments.worker_urls or arguments.prefill or arguments.decode
    has_workers = has_workers or arguments.service_discovery
    if arguments.config is None and not has_workers:
        parser.error(
            "nothing to serve: name a file with --config FILE (config/example.toml shows every "
            "key), or workers with --worker-urls http://HOST:PORT ..."
        )
    try:
        startup = startup_of(arguments, os.environ.get("SGLANG_OMNI_ADMIN_KEY", ""))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return start(startup)


def start(startup: Startup) -> int:
    # A SIGHUP or SIGUSR2 before its handler is installed would end the process. A function and not
    # SIG_IGN: child processes inherit ignored signals.
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    # Imported here: --help must not wait for a web framework.
    from omni_proxy.server import run

    lead_process_group()
    return run(startup)


def startup_of(
    arguments: Namespace, environment_key: str, launch: tuple[LaunchEntry, ...] = ()
) -> Startup:
    """Raises ConfigError for invalid workers."""
    pools = _pool_flags(arguments)
    urls = parse_worker_urls(arguments.worker_urls)
    ranks = ranks_in_urls(arguments.worker_urls)
    in_urls = {} if ranks is None else {"routing.ranks": ranks}
    return Startup(
        config_path=arguments.config,
        overrides=in_urls | overrides(arguments),
        flag_urls=urls,
        admin_key=environment_key,
        launch=launch,
        pool_workers=pool_workers(pools, urls),
        discover=discover_entries(_discovery_flags(arguments, pools)),
        kv_connector=connector_of(pools),
        warnings=warnings(arguments),
    )


def _pool_flags(arguments: Namespace) -> PoolFlags:
    """The flags for prefill and decode workers; `launch` has none of them."""
    flags = vars(arguments)
    return PoolFlags(
        prefill=flags.get("prefill") or (),
        decode=flags.get("decode") or (),
        sglang=bool(flags.get("pd_disaggregation")),
        vllm=bool(flags.get("vllm_pd_disaggregation")),
        connector=flags.get("kv_connector") or "",
    )


def _discovery_flags(arguments: Namespace, pools: PoolFlags) -> DiscoveryFlags:
    """The flags for discovery in Kubernetes; `launch` has none of them."""
    flags = vars(arguments)
    # vllm-router's arguments always name a connector, with or without pools.
    selects_pools = flags.get("prefill_selector") or flags.get("decode_selector")
    has_pools = pools.sglang or pools.vllm or (pools.connector and selects_pools)
    return DiscoveryFlags(
        on=bool(flags.get("service_discovery")),
        selector=flags.get("selector") or (),
        prefill_selector=flags.get("prefill_selector") or (),
        decode_selector=flags.get("decode_selector") or (),
        port=flags.get("service_discovery_port") or "",
        namespace=flags.get("service_discovery_namespace") or "",
        model_id_from=flags.get("model_id_from") or "",
        connector=connector_of(pools) if has_pools else None,
    )


def router_startup(
    argv: Sequence[str], dialect: Dialect = "sglang", warnings: tuple[str, ...] = ()
) -> Startup:
    """The startup of `omni-proxy launch-router`; `warnings` are logged before its own. Raises
    ConfigError."""
    startup = routed(router_parser().parse_args(argv), (), dialect)
    return replace(startup, warnings=warnings + startup.warnings)


def routed(
    arguments: Namespace, launch: tuple[LaunchEntry, ...], dialect: Dialect = "sglang"
) -> Startup:
    """The startup of a router; without --config FILE its defaults are those of sglang-router."""
    startup = startup_of(arguments, os.environ.get("SGLANG_OMNI_ADMIN_KEY", ""), launch)
    if arguments.config is not None:
        return startup
    defaults = DEFAULTS | VLLM_DEFAULTS if dialect == "vllm" else DEFAULTS
    return replace(startup, overrides=defaults | startup.overrides, dialect=dialect)


NEEDED: Final = ("grpc", "google.protobuf")
MISSING: Final = (
    "omni-proxy picker: Envoy's protocol needs packages that are not installed: "
    "pip install 'omni-proxy[picker]'"
)


def main_picker(argv: Sequence[str]) -> int:
    parser = picker_parser()
    arguments = parser.parse_args(argv)
    if arguments.config is None and not (arguments.worker_urls or arguments.service_discovery):
        parser.error("name a file with --config FILE, or workers with --worker-urls URL ...")
    if not all(map(_is_installed, NEEDED)):
        print(MISSING, file=sys.stderr)
        return 2
    try:
        startup = startup_of(arguments, os.environ.get("SGLANG_OMNI_ADMIN_KEY", ""))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # A single process: there are no counts of other processes to agree with.
    overrides = {**startup.overrides, "server.processes": 1}
    return start(replace(startup, overrides=overrides, picker=True))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
