"""Measures a running worker: how fast it computes prompts, and how long a decode step takes.

Requests go to its `/v1/completions`, streamed, with prompts that no cache can hold. Prefill: the
slope of the time to the first token over the length of the prompt. Decode: the time between tokens
with one request and with several at once; a straight line through both gives the step and what each
request adds. Each figure is the median of some requests. It blocks, in threads of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

import httpx

from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.report import percentile

SHORT_WORDS: Final = 64
LONG_WORDS: Final = 512
ANSWER_TOKENS: Final = 32
REPEATS: Final = 5
AT_ONCE: Final = 4
TIMEOUT_SECS: Final = 300.0


class CalibrationError(Exception):
    """The worker could not be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class _Timing:
    prompt_tokens: int
    first_secs: float
    step_secs: float  # between two tokens of the answer


def measure(url: str, progress: Callable[[str], None] = lambda text: None) -> EngineSpec:
    """Raises CalibrationError."""
    base = url.rstrip("/")
    with httpx.Client(timeout=TIMEOUT_SECS) as client:
        model = _model(client, base)
        progress("warming up")
        _ask(client, base, model, SHORT_WORDS)
        progress("prefill")
        short = [_ask(client, base, model, SHORT_WORDS) for _ in range(REPEATS)]
        long = [_ask(client, base, model, LONG_WORDS) for _ in range(REPEATS)]
        progress(f"decode, {AT_ONCE} requests at once")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            calls = [
                threads.submit(_ask, client, base, model, SHORT_WORDS)
                for _ in range(AT_ONCE * REPEATS)
            ]
            together = [call.result() for call in calls]
    tokens = _median(long, "prompt_tokens") - _median(short, "prompt_tokens")
    secs = _median(long, "first_secs") - _median(short, "first_secs")
    if tokens <= 0 or secs <= 0:
        raise CalibrationError(
            f"{url}: a longer prompt takes no longer, so prefill is not measured"
        )
    alone_ms = _median(short, "step_secs") * 1000
    more_ms = max(0.0, (_median(together, "step_secs") * 1000 - alone_ms) / (AT_ONCE - 1))
    return replace(
        EngineSpec(),
        prefill_tokens_per_sec=tokens / secs,
        decode_step_ms=max(0.0, alone_ms - more_ms),
        decode_step_ms_per_request=more_ms,
    )


def _median(timings: list[_Timing], name: str) -> float:
    return percentile(sorted(getattr(timing, name) for timing in timings), 50)


def _model(client: httpx.Client, base: str) -> str:
    try:
        response = client.get(f"{base}/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise CalibrationError(f"{base}/v1/models: {str(error) or type(error).__name__}") from None


def _ask(client: httpx.Client, base: str, model: str, words: int) -> _Timing:
    """One request with a new prompt. Raises CalibrationError."""
    body = {
        "model": model,
        "prompt": " ".join(secrets.token_hex(2) for _ in range(words)),
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    prompt_tokens = 0
    began_at = perf_counter()
    try:
        with client.stream("POST", f"{base}/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise CalibrationError(
                    f"{base}/v1/completions: status {response.status_code}: {response.text[:200]}"
                )
            for line in response.iter_lines():
                event = _event(line)
                if event.get("choices"):
                    times.append(perf_counter())
                usage = event.get("usage")
                if isinstance(usage, dict):
                    prompt_tokens = int(usage.get("prompt_tokens") or 0)
    except httpx.HTTPError as error:
        raise CalibrationError(
            f"{base}/v1/completions: {str(error) or type(error).__name__}"
        ) from None
    if len(times) < 2 or not prompt_tokens:
        raise CalibrationError(f"{base}/v1/completions: no stream of tokens with usage at its end")
    step_secs = (times[-1] - times[0]) / (len(times) - 1)
    return _Timing(prompt_tokens, times[0] - began_at, step_secs)


def _event(line: str) -> dict[str, object]:
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    event = json.loads(data)
    return event if isinstance(event, dict) else {}
