"""The command `omni-proxy replica`: parses arguments, serves or fetches, returns the exit status.

Status 0: stopped by a signal, or fetched. 1: failed. 2: invalid arguments or pipeline file. No
model runtime is imported before its environment is set; parsing arguments imports none.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omni_proxy.replica import llamacpp
from omni_proxy.replica.hard_exit import exit_process
from omni_proxy.replica.kv_events.publisher_settings import (
    add_kv_event_options,
    kv_event_params,
    kv_events_problem,
)
from omni_proxy.replica.kv_transfer.transfer_settings import add_transfer_options, transfer_problem
from omni_proxy.replica.model_file import MODELS, ModelFileError, cache_folder, fetch
from omni_proxy.replica.option_types import (
    address,
    count,
    count_or_0,
    deadline,
    port_number,
    seconds,
)

DEFAULT_ENGINE = "torch"
TINY = "tiny"
TEXT_MODELS = (TINY, "smollm2-135m")
INTERRUPTED = 130  # the status that shells expect after Ctrl-C
# Imports of the torch engine; hibari is needed only for speech.
REQUIRED_PACKAGES = ("numpy", "torch", "jinja2", "tiktoken", "safetensors", "prometheus_client")
REQUIRED_FOR_IMAGES = ("rapidocr_onnxruntime", "cv2", "PIL")
log = logging.getLogger(__name__)


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy replica",
        description="Serve models over the HTTP APIs of OpenAI, SGLang-Omni, SGLang and vLLM; "
        "missing model files are fetched first.",
        epilog="`omni-proxy replica fetch MODEL` only fetches a model's file into the cache; "
        "`omni-proxy replica profile SOURCE` reports on recorded events.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", type=address, default="127.0.0.1", help="address to listen on")
    add("--port", type=port_number, default=31000, help="port to listen on")
    add("--engine", choices=["torch", "llamacpp"], default=DEFAULT_ENGINE, help="inference engine")
    add(
        "--model",
        type=text_model,
        default="smollm2-135m",
        metavar="MODEL",
        help=f"the text model: {', '.join(TEXT_MODELS)}, or a path to a .gguf file",
    )
    add("--model-name", help="name that the model is served under (default: its own)")
    add("--threads", type=count, default=1, help="threads for computation")
    add(
        "--log-level",
        choices=list(llamacpp.VERBOSITY),
        default="info",
        help="level of log messages",
    )
    _add_cache(parser)
    _add_torch(parser)
    _add_group(parser)
    add_transfer_options(parser)
    add_kv_event_options(parser)
    llama = parser.add_argument_group("engine llamacpp")
    llama.add_argument("--parallel", type=count, default=4, help="requests computed concurrently")
    llama.add_argument("--context", type=count, default=2048, help="context length of each request")
    llama.add_argument(
        "--embeddings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also serve /v1/embeddings; slows down prompts",
    )
    return parser


def fetch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy replica fetch",
        description="Fetch a model's file into the cache folder and print its path.",
        allow_abbrev=False,
    )
    parser.add_argument("model", choices=sorted(MODELS))
    _add_cache(parser)
    return parser


def _add_torch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine torch")
    add = group.add_argument
    add("--speech", choices=["hibari", "off"], default="off", help="speech model")
    add("--transcription", choices=["whisper-tiny", "off"], default="off", help="ASR model")
    add("--images", choices=["ocr", "off"], default="off", help="how text in images is read")
    add("--pipeline", type=Path, metavar="FILE.toml", help="file that defines the stages")
    add("--admin-api-key", metavar="KEY",
        help="admin key (default: $SGLANG_OMNI_ADMIN_KEY); "
        "without one, admin routes need no key")  # fmt: skip
    add(
        "--weights-root",
        type=Path,
        metavar="DIR",
        help="the only folder that new weights are read from (default: any; none if --host accepts "
        "other machines and there is no admin key)",
    )
    add(
        "--profile-root",
        type=Path,
        metavar="DIR",
        help="the only folder that profiles are written to (default: any with an admin key, else "
        "the folder for temporary files)",
    )
    add(
        "--enable-tensor-updates",
        action="store_true",
        help="accept new weights in requests, as safetensors in base64 (never as a pickle)",
    )
    add(
        "--stream-speech-as",
        choices=["sse", "pcm", "openai-sse"],
        default="sse",
        help="default format of streamed speech",
    )
    add(
        "--dialect",
        choices=["both", "sglang", "vllm"],
        default="both",
        help="engine whose routes for trainers and operators are served in addition to OpenAI's",
    )
    add(
        "--stored-responses",
        type=count_or_0,
        default=1000,
        metavar="N",
        help="responses of /v1/responses to store for GET and previous_response_id; 0: none",
    )
    add("--max-in-flight", type=count_or_0, default=256, help="admitted requests; 0: no limit")
    add("--max-running", type=count, default=16, help="requests in one batch")
    add("--tp", type=count, default=1, metavar="N", help="processes that share the text model")
    add(
        "--own-process",
        choices=["decode", "look", "speak", "transcribe"],
        action="append",
        default=[],
        help="run that stage in its own process; may be repeated",
    )
    add("--drain-secs", type=seconds, default=5.0, help="time for requests in flight at shutdown")


def _add_group(parser: argparse.ArgumentParser) -> None:
    """Options of weight updates over a trainer's group."""
    group = parser.add_argument_group(
        "weights over a trainer's group",
        "/init_weights_update_group, /prepare_weights_update, /complete_weights_update and "
        "/update_weights_from_distributed; a call's timeout_s replaces these deadlines, but can "
        "only shorten that for arming",
    )
    add = group.add_argument
    add(
        "--weights-isolation",
        choices=["process", "thread"],
        default="process",
        help="where a blocking receive runs: in a child process, which isolates the replica from a "
        "faulty trainer, or in a thread (no second GPU context, but such a trainer can block or "
        "crash the replica)",
    )
    for name, default, what in (
        ("join", 300.0, "time for all ranks to join a group"),
        ("ready", 60.0, "time for all ranks to be armed; after it, the preparation is refused"),
        ("receive", 300.0, "time that a completion waits for tensors that are not yet received"),
        ("stall", 30.0, "time without progress after which a receive fails"),
    ):
        add(f"--weights-{name}-secs", type=deadline, default=default, metavar="SECS", help=what)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    folder = cache_folder(os.environ)
    parser.add_argument("--cache", type=Path, default=folder, help="folder of the model files")


def text_model(text: str) -> str:
    if text in TEXT_MODELS or text.endswith(".gguf"):
        return text
    known = ", ".join(TEXT_MODELS)
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}, nor a path to a .gguf file")


class MissingPackageError(Exception):
    """A package of an extra is not installed; the message says how to install it."""


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["profile", *rest]:
            from omni_proxy.replica.profile_report import main as profile

            return profile(rest)
        case ["stage-process", *rest]:
            from omni_proxy.replica.pipeline.stage_process import run_stage_process

            return run_stage_process(rest)
        case ["fetch", *rest]:
            arguments = fetch_parser().parse_args(rest)
            return _report_errors(partial(_fetch, arguments))
        case words:
            parser = serve_parser()
            arguments = parser.parse_args(words)
            if problem := transfer_problem(arguments) or kv_events_problem(arguments):
                parser.error(problem)
            if arguments.engine == "llamacpp":
                if arguments.model == TINY:
                    parser.error(f"--model {TINY} needs --engine torch")
                return _report_errors(partial(_serve_llamacpp, arguments))
            exit_process(_log_unexpected(partial(_serve_torch, arguments)))


def _log_unexpected(work: partial[int]) -> int:
    """Like `_report_errors`; also logs unexpected exceptions and returns 1 for them."""
    try:
        return _report_errors(work)
    except Exception:
        log.exception("replica_crashed")
        return 1


def _report_errors(work: partial[int]) -> int:
    try:
        return work()
    except (ModelFileError, llamacpp.EngineError, MissingPackageError) as error:
        _print_error(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_error(text: str) -> None:
    sys.stderr.write(f"omni-proxy replica: {text}\n")


def _fetch(arguments: argparse.Namespace) -> int:
    path = fetch(MODELS[arguments.model], arguments.cache, _print_error)
    sys.stdout.write(f"{path}\n")
    return 0


def _serve_llamacpp(arguments: argparse.Namespace) -> int:
    model = arguments.model
    path = fetch(MODELS[model], arguments.cache, _print_error) if model in MODELS else Path(model)
    llamacpp.serve(
        llamacpp.LlamaServerConfig(
            model_path=path,
            model_name=arguments.model_name or arguments.model,
            host=arguments.host,
            port=arguments.port,
            threads=arguments.threads,
            parallel=arguments.parallel,
            context=arguments.context,
            embeddings=arguments.embeddings,
            log_level=arguments.log_level,
        )
    )


def _serve_torch(arguments: argparse.Namespace) -> int:
    _check_installed(REQUIRED_PACKAGES)
    if arguments.images != "off" and arguments.pipeline is None:
        _check_installed(REQUIRED_FOR_IMAGES, "ocr")
    if kv_event_params(arguments):
        _check_installed(("zmq",))
    # By default, OpenMP's waiting threads spin, which is very slow if other processes are busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import trio

    from omni_proxy.replica.http_server import ListenError, launch_server
    from omni_proxy.replica.pipeline.config import PipelineConfigError
    from omni_proxy.replica.pipeline.runtime import StartError
    from omni_proxy.replica.torch_engine import build_app_options, build_pipeline

    try:
        pipeline = build_pipeline(arguments, _ensure_model_file)
        options = build_app_options(arguments, pipeline)
        trio.run(
            partial(
                launch_server,
                pipeline,
                host=arguments.host,
                port=arguments.port,
                drain_secs=arguments.drain_secs,
                log_level=arguments.log_level,
                **options,
            )
        )
    except PipelineConfigError as error:
        for problem in error.problems:
            _print_error(f"{arguments.pipeline}: {problem}")
        return 2
    except (ListenError, StartError) as error:
        _print_error(f"error: {error}")
        return 1
    return 0


def _check_installed(packages: Sequence[str], extra: str = "replica") -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"not installed: {', '.join(missing)}; run pip install 'omni-proxy[{extra}]'"
        )


def _ensure_model_file(model: str, cache: Path) -> str:
    """Return the verified file of a model, fetching it if missing.

    Returns "" for the default cache folder: the stage that loads the model verifies the file there.
    """
    is_default = cache == cache_folder(os.environ)
    if not is_default or not (cache / MODELS[model].file).exists():
        path = fetch(MODELS[model], cache, _print_error)
        return "" if is_default else str(path)
    return ""
