"""What every route gets: the pipeline client, names, and the operator's settings.

Invariant: nothing here changes while the app serves, except what `meters` counts. The module
imports no route, so that every route can import it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from omni_proxy.replica.api.common.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from omni_proxy.replica.pipeline.client import Client

ADMIN_KEY_VARIABLE = "SGLANG_OMNI_ADMIN_KEY"
MIB = 1024 * 1024
SpeechStreamFormat = Literal["sse", "pcm", "openai-sse"]
# Whose routes for trainers and operators are served; those of models are always there.
Dialect = Literal["both", "sglang", "vllm"]


def _admin_key_from_environment() -> str | None:
    return os.environ.get(ADMIN_KEY_VARIABLE) or None


class AppOptions(TypedDict, total=False):
    """Keyword arguments of `create_app`: any field of `RouteContext` but the client."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """Settings and services of the routes.

    `capabilities` None means unknown: no request is refused for a missing capability. `ready` None
    means ready from the start. `admin_api_key` None leaves admin routes open. `voices_dir` None is
    a folder in the user's cache. `cut_failed_streams` ends a failed chat stream without an error
    event and without `[DONE]`, as older servers do. `enable_tensor_updates` accepts new weights in
    request bodies. `profile_root` is the only folder for profiles; None allows any folder with an
    admin key, else the folder for temporary files. An empty list of media domains, or a media path
    of None, allows nothing. `dialect` says which engine's routes are served beside those of OpenAI.
    `tokenizer_model` is the text model whose tokens /tokenize tells, "" if there is none.
    `stored_responses` is how many of /v1/responses are kept. `started_unix_secs` and `instance`
    identify this process.
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
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    started_unix_secs: float = field(default_factory=time.time)
    meters: RequestMetrics = field(default_factory=RequestMetrics)

    def can(self, capability: str) -> bool:
        return self.capabilities is None or capability in self.capabilities
