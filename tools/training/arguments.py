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
# The pause modes of SGLang's and of vLLM's trainers; the first one is the default.
PAUSE_MODES = ("retract", "abort", "in_place", NO_PAUSE)
VLLM_PAUSE_MODES = ("keep", "wait", "abort", NO_PAUSE)
SECS_PER_ROUND = 120.0
EPILOG = """\
forms of a sync:
  two-phase  announce all buckets, wait until all ranks are ready, then send the bytes
  buckets    the same, bucket by bucket
  single     one call per bucket, with its bytes sent at the same time
  disk       a safetensors file that the replicas read: they need the same disk
  vllm       vLLM's calls: start, update with the bytes, finish; one group for all rounds

faults, in the last round (with --sync disk: {on_disk}):
{faults}

exit status: 0 every sync succeeded and all replicas have the trainer's weights; 1 otherwise;
2 invalid arguments; 3 it took longer than --deadline-secs
"""


def parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {name:<13}{each.what}" for name, each in FAULTS.items() if name != NONE)
    made = argparse.ArgumentParser(
        prog="tools/trainer",
        description="Fine-tune a small model for a few real steps, and sync its weights to the"
        " replicas behind an endpoint: a proxy, or one replica.",
        epilog=EPILOG.format(faults=faults, on_disk=", ".join(ON_DISK)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--endpoint", type=_url, default="http://127.0.0.1:30000", metavar="URL",
    )  # fmt: skip
    made.add_argument(
        "--model", choices=["tiny", "smollm2-135m"], default="tiny", help="model of the replicas"
    )
    made.add_argument("--rounds", type=_count, default=3, help="how often to train and sync (3)")
    made.add_argument("--steps", type=_count, default=4, help="training steps per round (4)")
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
    """Parse the arguments; ends the program with status 2 if they are invalid."""
    made = parser()
    arguments = made.parse_args(words)
    fault = arguments.fault
    if arguments.sync == DISK and fault not in (NONE, *ON_DISK):
        made.error(
            f"--fault {fault} needs a group, and --sync {DISK} has none: use another --sync, or "
            f"one of {', '.join(ON_DISK)}"
        )
    if arguments.sync == VLLM and fault != NONE:
        made.error(f"--fault {fault} does not work with --sync {VLLM}")
    modes = VLLM_PAUSE_MODES if arguments.sync == VLLM else PAUSE_MODES
    arguments.pause_mode = arguments.pause_mode or modes[0]
    if arguments.pause_mode not in modes:
        made.error(f"--pause-mode with --sync {arguments.sync} must be one of {', '.join(modes)}")
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
    made.add_argument(
        "--session", action="store_true", help="begin and end a weight update session"
    )
    made.add_argument("--group-name", default="weight_sync_group", metavar="NAME")
    made.add_argument("--host", default="127.0.0.1", help="address of this machine for replicas")
    made.add_argument(
        "--timeout-secs", type=_secs, default=120.0, help="limit of a call or a broadcast (120)"
    )
    made.add_argument(
        "--wait-secs",
        type=_secs,
        default=60.0,
        help="time for the endpoint and its workers to become ready (60)",
    )
    made.add_argument(
        "--deadline-secs",
        type=_secs,
        help=f"total limit, then exit with 3 ({SECS_PER_ROUND:g} per round, plus timeout and wait)",
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
    waits_secs: float = arguments.timeout_secs + arguments.wait_secs
    return given or SECS_PER_ROUND * arguments.rounds + waits_secs


def _count(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 10_000:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 to 10000")
    return int(word)


def _secs(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0")
    return number


def _url(word: str) -> str:
    if not word.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{word!r} does not begin with http:// or https://")
    return word.rstrip("/")
