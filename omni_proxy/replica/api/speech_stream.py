"""Speech while it is spoken: which form a request gets, and what a generation is in that form.

Invariant: the head waits for the first audio, so what fails before it is a plain HTTP error; what
fails after it is seen: an error event in the openai-sse form, a cut connection in the others. Every
sample is sent once: the client has cut from the terminal chunk what was streamed before it.
Source: api-server.md 1.4 and 7.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.replica.api.envelope import SpeechRefusal, server_fault
from omni_proxy.replica.api.errors import ClientError
from omni_proxy.replica.api.speaking import NO_AUDIO, USUAL_RATE, as_refusal
from omni_proxy.replica.api.speech_fields import SpeechAsk
from omni_proxy.replica.api.speech_writers import Form, Outcome, Writer
from omni_proxy.replica.pipeline.client import GenerateChunk


def choose_form(ask: SpeechAsk, stream_speech_as: Form) -> Form | None:
    """Return the form of the answer; None is no stream. Raises SpeechRefusal.

    stream   stream_format   answer
    false    absent, audio   no stream: one file
    true     absent          the server's own form, `stream_speech_as`
    true     audio           pcm: int16 samples; wants response_format pcm
    any      sse             openai-sse: `speech.audio.delta` events of int16 samples, no `[DONE]`;
                             wants response_format pcm or none
    The third form, sse, is `audio.speech.chunk` events of whole files, then `[DONE]`.
    """
    form: Form | None = None
    if ask.stream_format == "sse":
        form = "openai-sse"
    elif ask.stream:
        form = "pcm" if ask.stream_format == "audio" else stream_speech_as
    chosen = ask.response_format if ask.format_given else None
    if form == "pcm" and chosen != "pcm":
        raise SpeechRefusal(
            'a stream of raw audio needs response_format="pcm" (or ask for stream_format="sse")',
            "response_format",
        )
    if form == "openai-sse" and chosen not in (None, "pcm"):
        raise SpeechRefusal(
            'stream_format="sse" carries 16-bit samples: response_format must be "pcm" or absent',
            "response_format",
        )
    return form


class OneRate:
    """The sample rate of one request's audio, which its first piece sets."""

    def __init__(self) -> None:
        self.rate = 0

    def hold(self, chunk: GenerateChunk) -> int:
        """Return the rate of a chunk with audio.

        Raises SpeechRefusal where it changes: what was sent before has announced another.
        """
        rate = chunk.sample_rate or USUAL_RATE
        if self.rate not in (0, rate):
            raise server_fault(f"the sample rate changed from {self.rate} to {rate} Hz")
        self.rate = rate
        return rate


class SpokenShape:
    """What a generation's chunks are in one form; `ended` hears the outcome of a clean end."""

    def __init__(self, writer: Writer, ended: Callable[[Outcome], None]) -> None:
        self._writer = writer
        self._ended = ended
        self._rate = OneRate()

    def headers(self) -> dict[str, str]:
        return self._writer.headers(self._rate.rate)

    def feed(self, chunk: GenerateChunk) -> list[bytes]:
        """Raises SpeechRefusal for audio of another rate, and for an end without any."""
        pieces = []
        if chunk.audio:
            pieces.append(self._writer.audio(chunk.audio, self._rate.hold(chunk)))
        if chunk.terminal:
            if not self._rate.rate:
                raise server_fault(NO_AUDIO)
            outcome = Outcome.of(chunk.finish_reason, chunk.usage, chunk.extra)
            self._ended(outcome)
            pieces.append(self._writer.end(outcome))
        return pieces

    def failed(self, fault: ClientError | SpeechRefusal) -> bytes | None:
        return self._writer.failed(as_refusal(fault))
