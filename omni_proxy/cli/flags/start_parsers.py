"""Argument parsers of the commands that start something.

Values of configuration keys stay strings: the configuration validates them with the same rules and
messages as FILE.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from omni_proxy import __version__, native
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.flags.other_router_flags import add_ignored_flags, add_mapped_flags
from omni_proxy.config.configuration_flags import FLAG_ALIASES, FLAGS
from omni_proxy.config.fields import POLICIES, read_address
from omni_proxy.shared.engine_protocol import DEFAULT_BOOTSTRAP_PORT

USAGE: Final = "omni-proxy [COMMAND] [FLAGS]"
ABOUT: Final = "Reverse proxy and router for LLM inference servers."
COMMANDS: Final = """\
commands:
  omni-proxy [serve] ...     run the proxy: --config FILE, or --worker-urls URL ...
  omni-proxy init [FILE]     write a configuration file; asks for what no flag sets
  omni-proxy check FILE      validate FILE; binds nothing
  omni-proxy schema          JSON schema of FILE, for editors
  omni-proxy keys ...        give callers keys with limits: add, remove, usage; new, hash, check
  omni-proxy replica ...     run one inference replica; see `omni-proxy replica --help`
  omni-proxy launch ...      start replicas and the proxy in front of them
  omni-proxy picker ...      choose workers for Envoy and other callers; relays nothing
  omni-proxy launch-router   like sglang-router's launch_router: --worker-urls URL ...
  omni-proxy simulate ...    compare policies on a trace or a workload, in virtual time
  omni-proxy bench URL       measure latency and throughput of a running fleet

commands for a running proxy (--url URL or --config FILE):
  omni-proxy status          one screen: slow workers, those out of rotation, the last reload
  omni-proxy top             the same, live, on the full screen
  omni-proxy workers ...     list, add, remove, disable, enable, drain, revive
  omni-proxy explain [FILE]  where a request would go, and why
  omni-proxy logs --follow   its access log, pretty-printed
  omni-proxy trace ID        its route-log lines of a trace or a request
  omni-proxy weights ...     its workers' weights: status, pause, resolve, ...
  omni-proxy upgrade         start a new program, which takes over; no request is cut
  omni-proxy completion bash completion script for your shell (also zsh, fish)
"""
EXAMPLES: Final = """\
examples:
  omni-proxy --config config/example.toml
  omni-proxy --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 --policy least_request
  omni-proxy --config proxy.toml --port 8080 --log-level debug
  omni-proxy check proxy.toml --json
"""
_EPILOG: Final = f"""\
{EXAMPLES}
A flag overrides the configuration file, also after a reload. SIGHUP, a change of the file or POST
/reload reload it; SIGTERM drains, a second SIGTERM closes connections.
"""
_ROUTER_EPILOG: Final = """\
examples:
  omni-proxy launch-router --worker-urls http://HOST:8000 http://HOST:8001
  omni-proxy launch-router --port 30000

It starts without workers too: /health is 200, /ready 503, until
POST /add_worker?url=http://HOST:PORT adds one.
A worker that is still starting or unreachable gets requests as soon as it is healthy.
"""
_PICKER_EPILOG: Final = """\
examples:
  omni-proxy picker --config picker.toml
  omni-proxy picker --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 --policy least_request

Envoy connects to [picker] grpc_listen; /select and the control routes are at [server] host and
port. docs/picker.md has a configuration for Envoy.
"""
_LAUNCH_EPILOG: Final = """\
Other flags go to the engine unchanged; so does everything after a bare --.

examples:
  omni-proxy launch --dp-size 2 --model-path tiny
  omni-proxy launch --prefill 1 --decode 2 --model-path tiny
  omni-proxy launch --dp-size 4 --engine sglang --model-path ORG/MODEL --mem-fraction-static 0.8
  omni-proxy launch --dp-size 2 --command 'my-server --listen {host}:{port}'
"""
_HELP: Final[dict[str, tuple[str, str]]] = {
    "--host": ("HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("PORT", "port to listen on; 0 takes any free one (default 30000)"),
    "--policy": (
        "NAME",
        f"{', '.join(POLICIES)}, the name of an installed policy, or package.module:Class",
    ),
    "--prefill-policy": ("NAME", "policy that picks prefill workers (default: --policy)"),
    "--decode-policy": ("NAME", "policy that picks decode workers (default: --policy)"),
    "--model": ("NAME", "model of workers that are configured without one"),
    "--max-worker-retries": (
        "N",
        "failed attempts in a row that eject a worker; 0: never (default 3)",
    ),
    "--max-total-retries": ("N", "most attempts of one request, the first included (default 6)"),
    "--cache-threshold": (
        "SHARE",
        "cache_aware: share of a prompt that must match, 0 to 1 (default 0.5)",
    ),
    "--balance-abs-threshold": ("N", "cache_aware: load gap that is an imbalance (default 32)"),
    "--balance-rel-threshold": (
        "X",
        "cache_aware: load ratio that is an imbalance (default 1.0001)",
    ),
    "--eviction-interval": ("SECS", "cache_aware: time between two evictions (default 60)"),
    "--max-tree-size": (
        "BYTES",
        "cache_aware: most prompt text kept for all workers (default 16777216)",
    ),
    "--request-timeout-secs": (
        "SECS",
        "time for a whole non-streaming exchange; 0 is no limit (default 1800)",
    ),
    "--max-inflight": ("N", "most requests in flight, more are refused; 0 is no limit (default 0)"),
    "--queue-size": ("N", "requests that may wait instead of being refused (default 0)"),
    "--queue-timeout-secs": ("SECS", "longest wait in that queue; 0 is no limit (default 30)"),
    "--max-payload-size": ("BYTES", 'largest request body, also as "64MiB" (default 512MiB)'),
    "--health-failure-threshold": (
        "N",
        "failed probes in a row until a worker leaves rotation (default 3)",
    ),
    "--health-success-threshold": ("N", "successful probes in a row until it returns (default 2)"),
    "--health-check-timeout-secs": ("SECS", "time for one probe (default 5)"),
    "--health-check-interval-secs": ("SECS", "time between two probes (default 10)"),
    "--health-check-endpoint": ("PATH", "path that is probed (default /health)"),
    "--admin-api-key": ("KEY", "admin key (default: the file's, else SGLANG_OMNI_ADMIN_KEY)"),
    "--log-level": ("LEVEL", "debug, info, warning, error or critical (default info)"),
    "--tls-cert": ("FILE", "PEM file of the certificate and its chain; needs --tls-key too"),
    "--tls-key": ("FILE", "PEM file of the certificate's key"),
}


def short_help() -> str:
    """The text for a command line without arguments."""
    return (
        f"usage: {USAGE}\n\n{ABOUT}\n\n{COMMANDS}\n{EXAMPLES}\nomni-proxy --help lists the flags.\n"
    )


def serve_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy",
        usage=USAGE,
        description=f"{ABOUT}\n\n{COMMANDS}",
        epilog=_EPILOG,
    )
    _add_serving(parser)
    _add_pools(parser)
    _add_discovery(parser)
    add_ignored_flags(parser, "")
    return parser


def picker_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy picker",
        usage="omni-proxy picker (--config FILE | --worker-urls URL ...) [FLAGS]",
        description="Choose workers for requests that other programs relay: Envoy, through its "
        "external processor, and callers of POST /select. It relays no model requests itself.",
        epilog=_PICKER_EPILOG,
    )
    _add_serving(parser)
    _add_discovery(parser)
    return parser


def router_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy launch-router",
        usage="omni-proxy launch-router [--worker-urls URL ...] [FLAGS]",
        description="Route to workers that already run; the default policy is cache_aware.",
        epilog=_ROUTER_EPILOG,
    )
    _add_serving(parser, policy="cache_aware")
    _add_pools(parser)
    _add_discovery(parser)
    add_ignored_flags(parser, "")
    _add_verbose(parser, "--verbose")
    return parser


def launch_parser(engines: Sequence[str]) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy launch",
        usage="omni-proxy launch [--model-path MODEL] [--dp-size N] [FLAGS] [-- ENGINE FLAGS]",
        description="Start replicas, wait until they are ready, and route to them.",
        epilog=_LAUNCH_EPILOG,
    )
    replicas = parser.add_argument_group("replicas")
    add = replicas.add_argument
    add("--dp-size", "--dp", "--data-parallel-size", dest="data_parallel_size", metavar="N",
        type=_count, default=0, help="how many replicas (default 1)")  # fmt: skip
    add("--prefill", dest="prefill_replicas", metavar="N", type=_count, default=0,
        help="replicas that only compute prompts; with --decode, instead of --dp-size")  # fmt: skip
    add("--decode", dest="decode_replicas", metavar="N", type=_count, default=0,
        help="replicas that only decode, with KV caches from the prefill replicas")  # fmt: skip
    add("--kv-connector", dest="replica_connector", choices=["sglang", "nixl", "mooncake"],
        default="", help="protocol of KV transfers between replicas (default sglang)")  # fmt: skip
    add("--bootstrap-base-port", dest="bootstrap_base_port", metavar="PORT", type=_count,
        default=DEFAULT_BOOTSTRAP_PORT,
        help="first bootstrap port of prefill replicas (default %(default)s)")  # fmt: skip
    add("--model-path", metavar="MODEL", default="smollm2-135m",
        help="tiny, smollm2-135m (default), or what the engine can load")  # fmt: skip
    add("--engine", choices=engines,
        help="default: the built-in replica if it has the model, else sglang")  # fmt: skip
    add("--command", metavar="WORDS", default="",
        help="start each replica with this command instead; {host}, {port}, {bootstrap_port}, "
        "{index} and {gpus} are substituted")  # fmt: skip
    add("--served-model-name", metavar="NAME", default="", help="the name that clients use")
    add("--tp-size", "--tp", "--tensor-parallel-size", dest="tensor_parallel_size",
        metavar="N", type=_count, default=1, help="ranks of one replica (default 1)")  # fmt: skip
    add("--gpus-per-replica", metavar="N", type=int,
        help="GPUs of each, from CUDA_VISIBLE_DEVICES (default: tp-size, if any)")  # fmt: skip
    add("--worker-host", metavar="HOST", type=_address, default="127.0.0.1",
        help="address that replicas listen on (default 127.0.0.1)")  # fmt: skip
    add("--worker-base-port", "--router-dp-worker-base-port", metavar="PORT", type=_count,
        default=31000, help="use free ports from here on (default 31000)")  # fmt: skip
    add("--worker-startup-timeout-secs", "--router-worker-startup-timeout-secs", metavar="SECS",
        type=float, default=300.0,
        help="time for a replica to become ready (default 300)")  # fmt: skip
    _add_serving(parser, prefix="--router-", policy="cache_aware")
    add_ignored_flags(parser, "--router-")
    _add_verbose(parser, "--router-verbose")  # without the prefix it is the engine's
    return parser


def _address(text: str) -> object:
    try:
        return read_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return number


def _add_verbose(parser: argparse.ArgumentParser, flag: str) -> None:
    """Add sglang-router's flag for verbose logs."""
    parser.add_argument(
        flag, dest="server.log_level", action="store_const", const="debug",
        default=argparse.SUPPRESS, help="the same as --log-level debug",
    )  # fmt: skip


def _add_serving(
    parser: argparse.ArgumentParser, prefix: str = "", policy: str = "round_robin"
) -> None:
    """Add the proxy's own flags. With a prefix each has a second, prefixed name: an engine may have
    the same flag.

    `policy` is the command's default policy.
    """
    parser.add_argument("--version", action="version", version=native.full_version(__version__))
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="the TOML file, reloaded when it changes"
    )
    parser.add_argument(
        "--worker-urls",
        metavar="URL",
        nargs="*",
        action="extend",
        default=[],
        help="workers, in addition to those of the file",
    )
    for flag, key in FLAGS.items():
        metavar, text = _HELP[flag]
        if flag == "--policy":
            text = text.replace(policy, f"{policy} (default)")
        names = [flag, *FLAG_ALIASES.get(flag, ())]
        if prefix:
            names += [prefix + name.removeprefix("--") for name in names]
        # SUPPRESS: only flags that were given are in the namespace.
        parser.add_argument(*names, dest=key, metavar=metavar, default=argparse.SUPPRESS, help=text)
    add_mapped_flags(parser, prefix)


def _add_pools(parser: argparse.ArgumentParser) -> None:
    """Add sglang-router's and vllm-router's flags for prefill and decode workers."""
    group = parser.add_argument_group("prefill and decode workers")
    add = group.add_argument
    add("--prefill", metavar=("URL", "PORT"), nargs="+", action="append", default=[],
        help="a prefill worker, and its bootstrap port if any; may be repeated")  # fmt: skip
    add("--decode", metavar="URL", action="append", default=[],
        help="a decode worker; may be repeated")  # fmt: skip
    add("--pd-disaggregation", action="store_true", help="these workers are SGLang engines")
    add("--vllm-pd-disaggregation", action="store_true", help="these workers are vLLM engines")
    add("--kv-connector", metavar="NAME", default="",
        help="KV connector of vLLM engines: nixl (default) or mooncake")  # fmt: skip


def _add_discovery(parser: argparse.ArgumentParser) -> None:
    """Add sglang-router's and vllm-router's flags for pods of Kubernetes."""
    group = parser.add_argument_group("workers found in Kubernetes, as by [[discover]]")
    add = group.add_argument
    add("--service-discovery", action="store_true", help="find pods of the proxy's cluster")
    add("--selector", metavar="KEY=VALUE", nargs="+", default=[], help="labels of the pods")
    add("--prefill-selector", metavar="KEY=VALUE", nargs="+", default=[],
        help="labels of pods with prefill workers")  # fmt: skip
    add("--decode-selector", metavar="KEY=VALUE", nargs="+", default=[],
        help="labels of pods with decode workers")  # fmt: skip
    add("--service-discovery-port", metavar="PORT", default="",
        help="port of the workers (default 80); annotations of the pods override it")  # fmt: skip
    add("--service-discovery-namespace", metavar="NAME", default="",
        help="namespace of the pods (default: all)")  # fmt: skip
    add("--model-id-from", metavar="label:KEY", default="", help="pod label with the model's name")


def check_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy check",
        description="Validate FILE. Exit status 0: it loads; 2: it is refused.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the TOML file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser
