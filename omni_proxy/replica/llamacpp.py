"""The llama.cpp engine: its own HTTP server, in this process, on one GGUF file.

Invariant: `serve` never returns: it raises EngineError, or SIGTERM or SIGINT ends the process with
status 0. xllamacpp is imported lazily, because the proxy must work without it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from omni_proxy.shared.log_text import quote_value

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
# llama.cpp's levels: 1 errors, 2 warnings, 3 a line per step of a request, 4 everything.
VERBOSITY = {"error": 1, "warning": 2, "info": 2, "debug": 3}
# Prompts of idle slots are kept in memory for reuse; llama.cpp's own bound is 8 GiB.
PROMPT_CACHE_MIB = 512


class EngineError(Exception):
    """The engine cannot serve; the message has the reason and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerConfig:
    """Settings of one server: `context` is in tokens, for each of `parallel` requests.

    `embeddings` also serves embeddings; prompts are then processed more slowly.
    """

    model_path: Path
    model_name: str
    host: str
    port: int
    threads: int
    parallel: int
    context: int
    embeddings: bool
    log_level: str


def serve(serving: LlamaServerConfig) -> NoReturn:
    xllamacpp = _engine()
    _check_port_free(serving.host, serving.port)
    # Block signals before the engine's threads start, so that they inherit the mask. A signal that
    # arrives early stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        server = xllamacpp.Server(_params(xllamacpp, serving))
    except RuntimeError as error:
        raise EngineError(f"llama.cpp did not start (its reason is above): {error}") from error
    name = quote_value(serving.model_name)
    sys.stderr.write(f"replica_ready model={name} url={server.listening_address}\n")
    sys.stderr.flush()
    signal.sigwait(STOP_SIGNALS)
    # Don't run the server's destructor: it may take long, and it ends a running stream with a clean
    # last chunk, so that a truncated response looks complete. The kernel closes all sockets.
    os._exit(0)


def _engine() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise EngineError(
            f"the llama.cpp engine is not installed ({error}): pip install 'omni-proxy[replica]'"
        ) from error
    return xllamacpp


def _check_port_free(host: str, port: int) -> None:
    # llama.cpp would fail only after loading the model, without naming the reason.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host} port {port}: {error.strerror}; end the other program or "
            "choose another --host or --port"
        ) from error


def _params(xllamacpp: Any, serving: LlamaServerConfig) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(serving.model_path)
    params.model_alias = {serving.model_name}
    params.hostnames = [serving.host]
    params.port = serving.port
    params.cpuparams.n_threads = serving.threads
    params.cpuparams_batch.n_threads = serving.threads
    params.n_parallel = serving.parallel
    params.n_ctx = serving.context * serving.parallel
    params.cache_ram_mib = PROMPT_CACHE_MIB
    params.endpoint_metrics = True
    if serving.embeddings:
        params.embedding = True
        # The mean over all tokens, as in the torch engine. It has no effect on chat.
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.ui = False
    params.cors_origins = ""  # no access for pages of other origins
    params.cors_origins_explicit = True
    params.verbosity = VERBOSITY[serving.log_level]
    return params
