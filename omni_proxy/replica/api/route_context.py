"""Services for every route: the pipeline client, names, operator settings, request metrics.

Invariant: only the counts in `meters` change while the app serves. The module imports no route, so
that every route can import it. Names and units of metrics are SGLang's, so that its dashboards and
routers can read them; every series has the label `model_name`. Times are those of the trio clock,
in seconds. Gauges of the engine are in `api.metrics`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypedDict

import trio
from prometheus_client import CollectorRegistry, Counter, Histogram

from omni_proxy.replica.kv_transfer.request_fields import TransferFields

if TYPE_CHECKING:
    from omni_proxy.replica.pipeline.client import Client


FIRST_TOKEN_BUCKETS_SECS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60,
)  # fmt: skip
LATENCY_BUCKETS_SECS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 240)
_LABELS = ("model_name",)
ADMIN_KEY_VARIABLE = "SGLANG_OMNI_ADMIN_KEY"
MIB = 1024 * 1024
SpeechStreamFormat = Literal["sse", "pcm", "openai-sse"]
# Engines whose trainer and operator routes can be served; model routes are always served.
Dialect = Literal["both", "sglang", "vllm"]


class RequestMetrics:
    """The counters and histograms of one app, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "sglang:time_to_first_token_seconds",
            "Time until a streamed request's first piece of output.",
            _LABELS,
            registry=self.registry,
            buckets=FIRST_TOKEN_BUCKETS_SECS,
        )
        self.latency = Histogram(
            "sglang:e2e_request_latency_seconds",
            "Time from a request's submission to its end.",
            _LABELS,
            registry=self.registry,
            buckets=LATENCY_BUCKETS_SECS,
        )
        self.requests = self._count("num_requests", "Requests that finished.")
        self.aborted = self._count("num_aborted_requests", "Requests that did not finish.")

    def _count(self, name: str, help_text: str) -> Counter:
        return Counter(f"sglang:{name}", help_text, _LABELS, registry=self.registry)

    def timed(self, model_name: str) -> RequestTimer:
        return RequestTimer(self, model_name)


class RequestTimer:
    """Times one request from its creation on, until `finish` or `close` is first called.

    As a context manager, it finishes at a normal exit and counts an exception as an abort.
    """

    __slots__ = ("_awaits_output", "_metrics", "_model_name", "_open", "_started_secs")

    def __init__(self, metrics: RequestMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._started_secs = trio.current_time()
        self._awaits_output = True
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.close()

    def mark_first_output(self) -> None:
        """Record the time of the first output; later calls do nothing."""
        if self._awaits_output:
            self._awaits_output = False
            elapsed_secs = trio.current_time() - self._started_secs
            self._metrics.first_token.labels(self._model_name).observe(elapsed_secs)

    def finish(self) -> None:
        self._open = False
        metrics, name = self._metrics, self._model_name
        metrics.latency.labels(name).observe(trio.current_time() - self._started_secs)
        metrics.requests.labels(name).inc()

    def close(self) -> None:
        """Count the request as aborted unless it has finished."""
        if self._open:
            self._open = False
            self._metrics.aborted.labels(self._model_name).inc()


def _admin_key_from_environment() -> str | None:
    return os.environ.get(ADMIN_KEY_VARIABLE) or None


class AppOptions(TypedDict, total=False):
    """Keyword arguments of `create_app`: the fields of `RouteContext` except the client."""

    model_name: str
    model_path: str
    admin_api_key: str | None
    stream_speech_as: SpeechStreamFormat
    tts_batch_max_items: int
    max_speech_input_chars: int
    voices_dir: Path | str | None
    max_voices: int
    capabilities: frozenset[str] | None
    ready: Callable[[], bool] | None
    allowed_media_domains: tuple[str, ...]
    allowed_local_media_path: Path | str | None
    max_media_bytes: int
    max_body_bytes: int
    cut_failed_streams: bool
    enable_tensor_updates: bool
    profile_root: Path | str | None
    dialect: Dialect
    tokenizer_model: str
    stored_responses: int
    transfer: TransferFields


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """Settings and services of the routes.

    `capabilities` None means unknown: no request is refused for a missing capability. `ready` None
    means ready from the start. `admin_api_key` None leaves admin routes open. `voices_dir` None is
    a folder in the user's cache. `cut_failed_streams` ends a failed chat stream without an error
    event and without `[DONE]`, as older servers do. `enable_tensor_updates` accepts new weights in
    request bodies. `profile_root` is the only folder for profiles; None allows any folder with an
    admin key, else the folder for temporary files. An empty list of media domains, or a media path
    of None, allows none. `dialect` selects the engine whose routes are served in addition to
    OpenAI's. `tokenizer_model` is the text model of /tokenize, "" if there is none.
    `stored_responses` is how many responses of /v1/responses are stored. `transfer` is the role of
    a prefill or decode replica. `started_unix_secs` and `instance` identify this process.
    """

    client: Client
    model_name: str = "sglang-omni"
    model_path: str = ""
    admin_api_key: str | None = field(default_factory=_admin_key_from_environment, repr=False)
    stream_speech_as: SpeechStreamFormat = "sse"
    tts_batch_max_items: int = 32
    max_speech_input_chars: int = 4096
    voices_dir: Path | str | None = None
    max_voices: int = 1000
    capabilities: frozenset[str] | None = None
    ready: Callable[[], bool] | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | str | None = None
    max_media_bytes: int = 10 * MIB
    max_body_bytes: int = 64 * MIB
    cut_failed_streams: bool = False
    enable_tensor_updates: bool = False
    profile_root: Path | str | None = None
    dialect: Dialect = "both"
    tokenizer_model: str = ""
    stored_responses: int = 1000
    transfer: TransferFields = field(default_factory=TransferFields)
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    started_unix_secs: float = field(default_factory=time.time)
    meters: RequestMetrics = field(default_factory=RequestMetrics)

    def can(self, capability: str) -> bool:
        return self.capabilities is None or capability in self.capabilities
