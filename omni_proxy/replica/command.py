"""`omni-proxy replica`: arguments in, exit status out.

Status 0: stopped by a signal, or fetched. 1: failed. 2: invalid arguments or pipeline file. No
model runtime is imported before its environment is set.
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
from omni_proxy.replica.arguments import TINY, fetch_parser, serve_parser
from omni_proxy.replica.hard_exit import exit_process
from omni_proxy.replica.model_file import MODELS, ModelFileError, cache_folder, fetch

INTERRUPTED = 130  # what a shell expects after Ctrl-C
# Imports of the torch engine; hibari is needed only for speech.
REQUIRED_PACKAGES = ("numpy", "torch", "jinja2", "tiktoken", "safetensors", "prometheus_client")
REQUIRED_FOR_IMAGES = ("rapidocr_onnxruntime", "cv2", "PIL")

log = logging.getLogger(__name__)


class MissingPackageError(Exception):
    """A package of an extra is not installed; the text says how to install it."""


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["profile", *rest]:
            from omni_proxy.replica.profiling.report import main as profile

            return profile(rest)
        case ["stage-process", *rest]:
            # Used by single-file builds, which have no `python -m`.
            from omni_proxy.replica.pipeline.hosting.process_main import main as stage_process

            return stage_process(rest)
        case ["fetch", *rest]:
            arguments = fetch_parser().parse_args(rest)
            return _report_errors(partial(_fetch, arguments))
        case words:
            parser = serve_parser()
            arguments = parser.parse_args(words)
            if arguments.engine == "llamacpp":
                if arguments.model == TINY:
                    parser.error(f"--model {TINY} needs --engine torch")
                return _report_errors(partial(_serve_llamacpp, arguments))
            exit_process(_log_unexpected(partial(_serve_torch, arguments)))


def _log_unexpected(work: partial[int]) -> int:
    """As `_report_errors`, and 1 for unexpected exceptions, which are logged."""
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
    # With OpenMP's default, waiting threads spin, which is very slow beside other busy processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import trio

    from omni_proxy.replica.pipeline.config import PipelineConfigError
    from omni_proxy.replica.pipeline.hosting.runtime import StartError
    from omni_proxy.replica.pipeline.http_server import ListenError
    from omni_proxy.replica.pipeline.launch import launch_server
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
            f"not installed: {', '.join(missing)}; get them by pip install 'omni-proxy[{extra}]'"
        )


def _ensure_model_file(model: str, cache: Path) -> str:
    """Return the verified file of a model, fetching it if missing.

    "" for the default cache folder: the stage that loads the model finds and verifies it there.
    """
    is_default = cache == cache_folder(os.environ)
    if not is_default or not (cache / MODELS[model].file).exists():
        path = fetch(MODELS[model], cache, _print_error)
        return "" if is_default else str(path)
    return ""
