import msgspec
import pytest

from omni_proxy.replica.pipeline import stage_messages as m

PAYLOAD = m.StagePayload("r", m.OmniRequest("hi", {"a": 1}, {"task": "tts"}), {"raw_inputs": b"x"})


@pytest.mark.parametrize(
    "message",
    [
        m.Submit(PAYLOAD, "a", fed=True),
        m.StreamChunk("r", "a", {"audio_data": b"\0\1"}, 3, last=True),
        m.Abort("r"),
        m.Admin("o", "pause_generation", {"mode": "abort"}, 0.0),
        m.ProfilerStart("run", "t", None, False),
        m.ProfilerStop(),
        m.Shutdown(),
    ],
)
def test_a_message_to_a_stage_survives_serialization(message):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.StageInput) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Result("r", "s", {"text": "a", "output_token_logprobs": [[-0.5, 3, None]]}),
        m.ResultChunk("r", "s", {"audio_data": b"\0"}, 2, "audio"),
        m.StageFailure("r", "s", "bad", "caller"),
        m.AdminResult("o", "s", "model_info", True, "ok", {"rank": 0}, None, 0),
        m.StageReady("s", {"supports_admin": True}),
        m.StageEnded("s", "why"),
        m.StageStats("s", {"num_running_reqs": 1.0}),
    ],
)
def test_a_message_from_a_stage_survives_serialization(message):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.StageOutput) == message
