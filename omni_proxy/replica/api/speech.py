"""/v1/audio/speech: one text spoken, as one file or as a stream (api-server.md 1.4).

Invariant: the body is parsed here, by hand, and every refusal is OpenAI's envelope. An outcome can
be asked for only after a clean end, and only while it is among the last 1024.
"""

from __future__ import annotations

import uuid
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.envelope import SpeechRefusal
from omni_proxy.replica.api.errors import CLIENT_ERRORS, Refused, reply
from omni_proxy.replica.api.patient import PatientBody, leave_with, stream_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.speaking import Speaking, Spoken, as_refusal, engine_secs
from omni_proxy.replica.api.speech_fields import SpeechAsk, read_ask, read_object
from omni_proxy.replica.api.speech_stream import SpokenShape, choose_form
from omni_proxy.replica.api.speech_writers import Form, Outcome, writer_for

MOST_OUTCOMES: Final = 1024


class Outcomes:
    """How the last requests ended, first in, first out."""

    def __init__(self, most: int = MOST_OUTCOMES) -> None:
        self._most = most
        self._kept: dict[str, Outcome] = {}

    def keep(self, request_id: str, outcome: Outcome) -> None:
        self._kept[request_id] = outcome
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def of(self, request_id: str) -> Outcome | None:
        return self._kept.get(request_id)


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._speaking = Speaking(served)
        self._outcomes = Outcomes()

    async def create(self) -> Response:
        """POST /v1/audio/speech."""
        self._speaking.check_available()
        ask = read_ask(
            read_object(await request.get_data(cache=False, as_text=False, parse_form_data=False))
        )
        form = choose_form(ask, self._served.stream_speech_as)
        self._speaking.check(ask)
        request_id = f"speech-{uuid.uuid4()}"
        if form is not None:
            return await self._stream(ask, form, request_id)
        timing = self._served.meters.timed(self._served.model_name)
        try:
            spoken = await self._speaking.speak(ask, request_id)
            timing.first()
            timing.ended()
        finally:
            timing.left()
        self._outcomes.keep(request_id, _outcome_of(spoken))
        return _whole_file(spoken, ask, request_id)

    async def _stream(self, ask: SpeechAsk, form: Form, request_id: str) -> Response:
        lowered = await self._speaking.lower(ask, stream=True)
        shape = SpokenShape(
            writer_for(form, ask, request_id),
            lambda outcome: self._outcomes.keep(request_id, outcome),
        )
        body = PatientBody(
            self._served.client.generate(lowered, request_id),
            shape,
            self._served.meters.timed(self._served.model_name),
        )
        try:
            await body.begin()
        except CLIENT_ERRORS as fault:
            raise as_refusal(fault) from None
        return stream_of(body, shape.headers())

    async def outcome(self, request_id: str) -> Response:
        """GET /v1/audio/speech/{request_id}."""
        found = self._outcomes.of(request_id)
        if found is None:
            raise Refused(404, f"no outcome is known for speech request {request_id!r}")
        told = {"request_id": request_id, "finish_reason": found.finish_reason}
        return reply(told | {"usage": found.usage})


def _outcome_of(spoken: Spoken) -> Outcome:
    result = spoken.result
    return Outcome.of(result.finish_reason, result.usage, result.extra)


def _whole_file(spoken: Spoken, ask: SpeechAsk, request_id: str) -> Response:
    """Return the encoded bytes with everything that is known in the head."""
    result = spoken.result
    headers = {
        "content-disposition": f'attachment; filename="speech.{ask.response_format}"',
        "x-request-id": request_id,
        "x-finish-reason": result.finish_reason or "unknown",
    }
    counts = result.usage or {}
    for name, headed in (
        ("prompt_tokens", ("x-prompt-tokens", "x-sglang-omni-input-tokens")),
        ("completion_tokens", ("x-completion-tokens", "x-sglang-omni-output-tokens")),
        ("total_tokens", ("x-sglang-omni-total-tokens",)),
    ):
        if counts.get(name) is not None:
            headers |= dict.fromkeys(headed, str(counts[name]))
    engine = engine_secs(result.usage, result.extra)
    if engine is not None:
        headers["x-engine-time"] = str(engine)
    return Response(spoken.data, 200, headers, content_type=spoken.media_type)


async def _refused(refusal: SpeechRefusal) -> Response:
    return refusal.response()


def answer_refusals(app: QuartTrio) -> None:
    """Have every SpeechRefusal that leaves a route answered as its envelope."""
    app.register_error_handler(SpeechRefusal, _refused)


def mount(app: QuartTrio, served: Served) -> None:
    routes = _Routes(served)
    answer_refusals(app)
    leave_with(app)
    app.add_url_rule("/v1/audio/speech", "speech", routes.create, methods=["POST"])
    app.add_url_rule(
        "/v1/audio/speech/<request_id>", "speech_outcome", routes.outcome, methods=["GET"]
    )
