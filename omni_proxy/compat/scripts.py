"""The console scripts `sglang-router` and `vllm-router`, and `python -m` of their modules.

Contract: flags, defaults and subcommands are those of the two programs; the exit status is ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from omni_proxy import __version__, native
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.serve import start
from omni_proxy.compat.base_router_args import RouterArgsBase
from omni_proxy.compat.sglang_router_args import SglangRouterArgs
from omni_proxy.compat.start_router import order_for, startup_of
from omni_proxy.compat.vllm_router_args import VllmRouterArgs

MISUNDERSTOOD = 2
_USAGE = """\
usage: sglang-router [launch | server] [FLAGS]

  launch   route to workers that already run; --help lists the flags
  server   start replicas and the proxy in front of them, like `omni-proxy launch`

This is omni-proxy, which replaces sglang-router.
"""


def router_parser(args_class: type[RouterArgsBase], program: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=program,
        description="Route to workers that already run (omni-proxy).",
    )
    parser.add_argument("--version", action="version", version=native.full_version(__version__))
    args_class.add_cli_args(parser)
    return parser


def parse_sglang_args(words: Sequence[str]) -> SglangRouterArgs:
    return SglangRouterArgs.from_cli_args(
        router_parser(SglangRouterArgs, "sglang-router").parse_args(words)
    )


def parse_vllm_args(words: Sequence[str]) -> VllmRouterArgs:
    return VllmRouterArgs.from_cli_args(
        router_parser(VllmRouterArgs, "vllm-router").parse_args(words)
    )


def launch_sglang(words: Sequence[str] | None = None) -> int:
    """`python -m sglang_router.launch_router`, and `sglang-router launch`."""
    return _serve(SglangRouterArgs, "sglang-router", words)


def launch_vllm(words: Sequence[str] | None = None) -> int:
    """`vllm-router`, and `python -m vllm_router.launch_router`."""
    return _serve(VllmRouterArgs, "vllm-router", words)


def launch_server(words: Sequence[str] | None = None) -> int:
    """`python -m sglang_router.launch_server`: replicas of sglang, unless flags name others."""
    from omni_proxy.cli.launch import main  # imported here: a router does not need it

    return main(_given(words))


def sglang_main(words: Sequence[str] | None = None) -> int:
    """`sglang-router`."""
    given = _given(words)
    command, rest = (given[0], given[1:]) if given else ("", [])
    if command == "launch":
        return launch_sglang(rest)
    if command == "server":
        return launch_server(rest)
    if command in ("--version", "-V", "--version-verbose"):
        print(f"omni-proxy {__version__}, in the place of sglang-router")  # noqa: T201
        return 0
    wanted = command in ("-h", "--help")
    print(_USAGE, end="", file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else MISUNDERSTOOD


def _serve(args_class: type[RouterArgsBase], program: str, words: Sequence[str] | None) -> int:
    parser = router_parser(args_class, program)
    try:
        args = args_class.from_cli_args(parser.parse_args(_given(words)))
        return start(startup_of(order_for(args)))
    except ValueError as refusal:  # RouterArgsError among them
        print(f"{program}: {refusal}", file=sys.stderr)  # noqa: T201
        return MISUNDERSTOOD


def _given(words: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if words is None else words)
