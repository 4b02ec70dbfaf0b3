"""The command line of the trainer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from omni_proxy.cli.client.admin_client import KEY_VARIABLE
from omni_proxy.cli.client.tls_options import add_tls_arguments
from tools.training.buckets import FLATTENED, MIB
from tools.training.faults import FAULTS, NONE, ON_DISK
from tools.training.forms import FORMS
from tools.training.sync import DISK, VLLM, SyncOptions

NO_PAUSE = "none"
# By how a trainer speaks, the first one is what it says unless it is told otherwise.
PAUSE_MODES = ("retract", "abort", "in_place", NO_PAUSE)
VLLM_PAUSE_MODES = ("keep", "wait", "abort", NO_PAUSE)
SECS_PER_ROUND = 120.0
EPILOG = """\
forms of a sync:
  two-phase  everything is announced, everybody gets ready, then the bytes come
  buckets    the same for each bucket by itself
  single     a call per bucket, and its bytes at the same time
  disk       a safetensors file that the replicas read: they need the same disk
  vllm       vLLM's calls: start, update while the bytes come, finish; one group for all rounds

faults, in the last round (with --sync disk: {on_disk}):
{faults}

exit status: 0 every sync was good and all replicas hold the trainer's weights; 1 not so;
2 these words were not understood; 3 it took longer than --deadline-secs
"""


def parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {name:<13}{each.what}" for name, each in FAULTS.items() if name != NONE)
    made = argparse.ArgumentParser(
        prog="tools/trainer",
        description="Fine-tune a small model for a few real steps, and give its weights to the"
        " replicas behind an endpoint: a proxy, or one replica.",
        epilog=EPILOG.format(faults=faults, on_disk=", ".join(ON_DISK)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--endpoint", type=_url, default="http://127.0.0.1:30000", metavar="URL",
    )  # fmt: skip
    made.add_argument(
        "--model", choices=["tiny", "smollm2-135m"], default="tiny", help="what the replicas serve"
    )
    made.add_argument("--rounds", type=_count, default=3, help="learn and sync so often (3)")
    made.add_argument("--steps", type=_count, default=4, help="of learning, in each round (4)")
    made.add_argument("--json", action="store_true", help="a line of JSON per round")
    _how_to_sync(made)
    made.add_argument(
        "--api-key", metavar="KEY", default="", help=f"a proxy's admin key; else {KEY_VARIABLE}"
    )
    add_tls_arguments(made)
    made.add_argument("--fault", choices=list(FAULTS), default=NONE, help="see below")
    made.add_argument(
        "--stop-secs", type=_secs, default=60.0, help="how long the fault `stop` lasts (60)"
    )
    return made


def understood(words: Sequence[str] | None) -> argparse.Namespace:
    """Ends the program with 2 where they mean nothing, also together."""
    made = parser()
    arguments = made.parse_args(words)
    fault = arguments.fault
    if arguments.sync == DISK and fault not in (NONE, *ON_DISK):
        made.error(
            f"--fault {fault} is of a group, and --sync {DISK} has none: take another --sync, or "
            f"one of {', '.join(ON_DISK)}"
        )
    if arguments.sync == VLLM and fault != NONE:
        made.error(f"--fault {fault} is of another --sync than {VLLM}")
    modes = VLLM_PAUSE_MODES if arguments.sync == VLLM else PAUSE_MODES
    arguments.pause_mode = arguments.pause_mode or modes[0]
    if arguments.pause_mode not in modes:
        made.error(f"--pause-mode of --sync {arguments.sync} is one of {', '.join(modes)}")
    return arguments


def _how_to_sync(made: argparse.ArgumentParser) -> None:
    made.add_argument("--sync", choices=[*FORMS, DISK, VLLM], default="two-phase", help="see below")
    made.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    made.add_argument("--bucket-mb", type=_secs, default=64.0, help="size of a bucket, MiB (64)")
    made.add_argument("--load-format", choices=[FLATTENED], help="a bucket's bytes as one message")
    made.add_argument(
        "--pause-mode",
        choices=[*PAUSE_MODES, *VLLM_PAUSE_MODES[:2]],
        help=f"{PAUSE_MODES[0]}, of --sync {VLLM} {VLLM_PAUSE_MODES[0]}",
    )
    made.add_argument("--session", action="store_true", help="begin and end the update around it")
    made.add_argument("--group-name", default="weight_sync_group", metavar="NAME")
    made.add_argument("--host", default="127.0.0.1", help="where replicas find this machine")
    made.add_argument(
        "--timeout-secs", type=_secs, default=120.0, help="of a call or a broadcast (120)"
    )
    made.add_argument(
        "--wait-secs",
        type=_secs,
        default=60.0,
        help="so long for the endpoint and what is behind it to come up (60)",
    )
    made.add_argument(
        "--deadline-secs",
        type=_secs,
        help=f"of everything; then it ends with 3 ({SECS_PER_ROUND:g} a round, timeout and wait)",
    )


def sync_options(arguments: argparse.Namespace) -> SyncOptions:
    return SyncOptions(
        form=arguments.sync,
        backend=arguments.backend,
        bucket_bytes=int(arguments.bucket_mb * MIB),
        load_format=arguments.load_format,
        pause_mode=None if arguments.pause_mode == NO_PAUSE else arguments.pause_mode,
        group_name=arguments.group_name,
        session=arguments.session,
        timeout_secs=arguments.timeout_secs,
        host=arguments.host,
    )


def deadline_of(arguments: argparse.Namespace) -> float:
    given: float | None = arguments.deadline_secs
    patience: float = arguments.timeout_secs + arguments.wait_secs
    return given or SECS_PER_ROUND * arguments.rounds + patience


def _count(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 10_000:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 to 10000")
    return int(word)


def _secs(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return number


def _url(word: str) -> str:
    if not word.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{word!r} does not begin with http:// or https://")
    return word.rstrip("/")
