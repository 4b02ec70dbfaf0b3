"""`launch_router`: runs the proxy for a trainer, with router arguments, until it is ended; and
`omni-proxy router-process`, the child in which it runs.

Contract: the call blocks, like that of the other routers. The child has its own interpreter: a
trainer's process may be a fork that has threads, event loops and signal handlers, and the call may
come from any thread. Signals to the calling process are forwarded, and the child ends with it,
however it ends. The child's process name is that of the router that it replaces, because scripts of
trainers search for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import site
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from omni_proxy.cli.flags.other_router_flags import PAGE
from omni_proxy.cli.serve import router_startup, start
from omni_proxy.compat.base_router_args import (
    RouterArgsBase,
    default_of,
    field_table,
    flag_of,
    has_effect,
    refusal_of,
)
from omni_proxy.compat.sglang_router_args import SglangRouterArgs
from omni_proxy.compat.vllm_router_args import VllmRouterArgs
from omni_proxy.config.configuration_flags import Dialect, Startup
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.shared.child_process import exit_text, program_argv

_SCRAPED: Final = frozenset(("--prometheus-host",))


class RouterArgsError(ValueError):
    """Unsupported arguments; the text has their names, the reasons and alternatives."""


def command_words(args: RouterArgsBase) -> list[str]:
    """The arguments of `omni-proxy launch-router`. Raises RouterArgsError."""
    refused = []
    words: list[str] = []
    for name, field in field_table(type(args)).items():
        value, flag = getattr(args, name), flag_of(name)
        if flag in _idle_flags(args):
            continue
        if not has_effect(flag):
            if value in (None, False, default_of(field)):
                continue
            if why := refusal_of(flag):
                refused.append(f"{name}: {why} ({PAGE})")
                continue
        words += _words(flag, value)
    if refused:
        raise RouterArgsError("\n".join(("not served by omni-proxy:", *refused)))
    return words


def unknown_warning(names: Sequence[str]) -> str:
    """The log line for unknown arguments."""
    return f"unknown router arguments, which have no effect: {', '.join(names)}"


def _idle_flags(args: RouterArgsBase) -> frozenset[str]:
    """Flags that have no meaning for those routers with these arguments."""
    return _SCRAPED if getattr(args, "prometheus_port", None) is None else frozenset()


def _pool_words(given: object) -> list[str]:
    """A decode worker's URL; or a prefill worker's URL and its port, "none" if it is None."""
    if isinstance(given, str):
        return [given]
    url, *ports = given if isinstance(given, list | tuple) else [given]
    return [str(url), *("none" if port is None else str(port) for port in ports)]


def _words(flag: str, value: object) -> list[str]:
    """The words of a flag; None, false and empty lists give no flag, as they are its default."""
    if value is None or value is False or value in ([], (), {}):
        return []
    if isinstance(value, dict):
        return [flag, *(f"{key}={text}" for key, text in value.items())]
    if value is True:
        return [flag]
    if flag in ("--prefill", "--decode") and isinstance(value, list | tuple):
        return [word for each in value for word in (flag, *_pool_words(each))]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    text = str(value)
    if flag == "--host":  # trainers write IPv6 addresses in brackets
        text = text.removeprefix("[").removesuffix("]")
    return [f"{flag}={text}"]


# Not SIGHUP: it ends the caller, as with those routers, and thereby the child.
FORWARDED_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class RouterEnded(RuntimeError):
    """The proxy ended with an error; its own output has the reason."""


def launch_router(args: object) -> None:
    """Run the proxy until it is ended by a signal; a namespace is read as sglang_router's.

    Raises RouterArgsError for unsupported arguments, before anything runs, and RouterEnded if the
    proxy failed.
    """
    _run(_as_args(args, SglangRouterArgs))


def launch_vllm_router(args: object) -> None:
    """Like `launch_router`; a namespace is read as vllm_router's."""
    _run(_as_args(args, VllmRouterArgs))


class Router:
    """The router as an object, for older scripts: `Router.from_args(args).start()`."""

    args_class: type[RouterArgsBase] = SglangRouterArgs

    def __init__(self, **fields: object) -> None:
        self._args = self.args_class(**fields)

    @classmethod
    def from_args(cls, args: object) -> Router:
        made = cls()
        made._args = _as_args(args, cls.args_class)
        return made

    def start(self) -> None:
        """Run the proxy until it ends. Raises the exceptions of `launch_router`."""
        _run(self._args)


class VllmRouter(Router):
    """Like `Router`, with the defaults of vllm-router."""

    args_class = VllmRouterArgs


def _as_args(args: object, usual: type[RouterArgsBase]) -> RouterArgsBase:
    if isinstance(args, RouterArgsBase):
        return args
    return usual.from_cli_args(args if isinstance(args, Namespace) else Namespace(**vars(args)))


def order_for(args: RouterArgsBase) -> Order:
    """The validated arguments for the child process. Raises RouterArgsError."""
    unknown = sorted(args.unknown_fields())
    order = Order(
        words=command_words(args),
        dialect=args.dialect,
        warnings=[unknown_warning(unknown)] if unknown else [],
        parent=os.getpid(),
    )
    try:
        startup_of(order).effective_config(Config())
    except ConfigError as refusal:
        raise RouterArgsError(str(refusal)) from None
    return order


def _run(args: RouterArgsBase) -> None:
    status = _Child(order_for(args)).wait()
    if status:
        raise RouterEnded(f"omni-proxy {exit_text(status)}; its output has the reason")


class _Child:
    """The interpreter that runs the proxy."""

    def __init__(self, order: Order) -> None:
        self._order = msgspec.json.encode(order)
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # signals that arrived before the child was started

    def wait(self) -> int:
        """Run the child to its end; returns its exit status, negative for a signal."""
        with self._forwarded_signals():
            # Keys are not in the command line, which other users can read.
            self._process = subprocess.Popen(
                [*program_argv(), "router-process", FROM_STDIN],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": _python_path()},
                # Ctrl-C goes to the terminal's whole process group: the child would get it twice.
                process_group=0,
            )
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(self._order)
            for number in self._early:
                self._process.send_signal(number)
            return self._process.wait()

    @contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals only in the main thread
            return
        before = {
            number: signal.signal(number, self._forward_signal) for number in FORWARDED_SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _forward_signal(self, number: int, _: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _python_path() -> str:
    """PYTHONPATH with which the child finds this program and its packages where the caller found
    them."""
    usual = {Path(path) for path in site.getsitepackages()}
    specs = [importlib.util.find_spec(name) for name in ("omni_proxy", "trio")]
    roots = [Path(spec.origin).parents[1] for spec in specs if spec and spec.origin]
    ours = [str(root) for root in dict.fromkeys(roots) if root not in usual]
    before = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*ours, *([before] if before else [])])


_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl(2)
_SET_NAME: Final = 15
ORPHANED: Final = 1
FROM_STDIN: Final = "-"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parent's request: the arguments of `omni-proxy launch-router`, and its process id."""

    words: list[str]
    dialect: Dialect
    warnings: list[str]
    parent: int


def main(argv: Sequence[str]) -> int:
    if list(argv) != [FROM_STDIN]:
        raise SystemExit("router-process is internal: omni-proxy starts it for its Python API")
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    # The mask of blocked signals is inherited from the parent.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _set_process(f"{order.dialect}::router")
    if os.getppid() != order.parent:  # the parent ended before PDEATHSIG was set
        return ORPHANED
    return start(startup_of(order))


def startup_of(order: Order) -> Startup:
    """Raises ConfigError for invalid arguments."""
    return router_startup(order.words, order.dialect, tuple(order.warnings))


def _set_process(name: str) -> None:
    """Set the process name, and the signal at the end of the parent's thread, which waits for this
    process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NAME, name.encode(), 0, 0, 0)
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
