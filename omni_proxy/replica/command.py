"""`omni-proxy replica`: arguments in, exit status out.

Status 0: stopped by a signal, or fetched. 1: could not. 2: the arguments were wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_proxy.replica import llamacpp
from omni_proxy.replica.model_file import MODELS, ModelFileError, cache_folder, fetch

INTERRUPTED = 130  # what a shell expects after Ctrl-C


def main(argv: Sequence[str]) -> int:
    fetching = argv[:1] == ["fetch"]
    arguments = _fetch_parser().parse_args(argv[1:]) if fetching else _parser().parse_args(argv)
    try:
        path = fetch(MODELS[arguments.model], arguments.cache, _say)
        if fetching:
            sys.stdout.write(f"{path}\n")
            return 0
        llamacpp.serve(_serving(arguments, path))
    except (ModelFileError, llamacpp.EngineError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _say(text: str) -> None:
    sys.stderr.write(f"omni-proxy replica: {text}\n")


def _serving(arguments: argparse.Namespace, path: Path) -> llamacpp.Serving:
    return llamacpp.Serving(
        model_path=path,
        model_name=arguments.model_name or arguments.model,
        host=arguments.host,
        port=arguments.port,
        threads=arguments.threads,
        parallel=arguments.parallel,
        context=arguments.context,
        log_level=arguments.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy replica",
        description="Serve a language model over the OpenAI HTTP API; its file is fetched first.",
        epilog="`omni-proxy replica fetch MODEL` only puts a model's file into the cache folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=port_number, default=31000, help="port to listen on")
    add("--engine", choices=["llamacpp"], default="llamacpp", help="what computes")
    add("--model", choices=sorted(MODELS), default="smollm2-135m", help="the model")
    add("--model-name", help="name to serve it under, if not the model's own")
    add("--threads", type=count, default=1, help="threads that compute")
    add("--parallel", type=count, default=4, help="requests computed at once")
    add("--context", type=count, default=2048, help="tokens of each request")
    add("--log-level", choices=list(llamacpp.VERBOSITY), default="info", help="what is told")
    _add_cache(parser)
    return parser


def _fetch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy replica fetch",
        description="Put a model's file into the cache folder and print its path.",
        allow_abbrev=False,
    )
    parser.add_argument("model", choices=sorted(MODELS))
    _add_cache(parser)
    return parser


def _add_cache(parser: argparse.ArgumentParser) -> None:
    folder = cache_folder(os.environ)
    parser.add_argument("--cache", type=Path, default=folder, help="folder of the model files")


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def port_number(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not within 1 and 65535")
    return number
