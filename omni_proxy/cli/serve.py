"""`omni-proxy [serve]`: what the command line asks for, handed to the root; and what
`launch-router` asks for, with the defaults of sglang-router.

FILE is read there, by the code that reads it again later; here nothing is opened.
"""

import os
import signal
import sys
import typing
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from omni_proxy.cli.flags.arguments import router_parser, serve_parser, short_help
from omni_proxy.cli.flags.peer_flags import overrides, warnings
from omni_proxy.cli.frozen_binary import lead_process_group
from omni_proxy.config.flags import Dialect, Startup, parse_worker_urls
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import LaunchEntry, RetryCause

# As sglang-router has it.
DEFAULTS: Final[dict[str, object]] = {
    "routing.policy": "cache_aware",
    # Its clients expect a worker's passing failure to be tried elsewhere, and tell "busy" (429)
    # from "out of order" (503).
    "routing.retry_on": typing.get_args(RetryCause),
    "server.overload_status": 429,
}


def main(argv: Sequence[str]) -> int:
    if not argv:
        sys.stderr.write(short_help())
        return 2
    parser = serve_parser()
    arguments = parser.parse_args(argv)
    if arguments.config is None and not arguments.worker_urls:
        parser.error(
            "nothing to serve: name a file with --config FILE (config/example.toml shows every "
            "key), or workers with --worker-urls http://HOST:PORT ..."
        )
    try:
        startup = startup_of(arguments, os.environ.get("SGLANG_OMNI_ADMIN_KEY", ""))
    except ConfigError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return start(startup)


def start(startup: Startup) -> int:
    # One that comes before anybody waits for it would end us, and FILE has yet to be read. A
    # function, for what is ignored would be ignored by all that we start, too.
    signal.signal(signal.SIGHUP, lambda *_: None)
    # Here and not above: --help should not wait for a web framework.
    from omni_proxy.server import run

    lead_process_group()
    return run(startup)


def startup_of(
    arguments: Namespace, environment_key: str, launch: tuple[LaunchEntry, ...] = ()
) -> Startup:
    """Raises ConfigError for worker URLs that can't be."""
    return Startup(
        config_path=arguments.config,
        overrides=overrides(arguments),
        flag_urls=parse_worker_urls(arguments.worker_urls),
        admin_key=environment_key,
        launch=launch,
        warnings=warnings(arguments),
    )


def router_startup(
    argv: Sequence[str], dialect: Dialect = "sglang", warnings: tuple[str, ...] = ()
) -> Startup:
    """What `omni-proxy launch-router` starts with; `warnings` go to its log, before its own. Raises
    ConfigError."""
    startup = routed(router_parser().parse_args(argv), (), dialect)
    return replace(startup, warnings=warnings + startup.warnings)


def routed(
    arguments: Namespace, launch: tuple[LaunchEntry, ...], dialect: Dialect = "sglang"
) -> Startup:
    """Without a FILE, which has words of its own, the defaults are those of that router."""
    startup = startup_of(arguments, os.environ.get("SGLANG_OMNI_ADMIN_KEY", ""), launch)
    if arguments.config is not None:
        return startup
    return replace(startup, overrides=DEFAULTS | startup.overrides, dialect=dialect)
