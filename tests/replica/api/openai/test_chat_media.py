import base64
import struct

import numpy as np
import pytest

from omni_proxy.replica.api.openai.chat_media import MAX_MESSAGES
from omni_proxy.replica.audio import encode_wav
from tests.replica.api.api_fixture import MESSAGES

RATE = 8000


def wav(level, count=4):
    return encode_wav(np.full(count, level, np.float32), RATE)


def b64(data):
    return base64.b64encode(data).decode()


def part(level):
    return {"type": "input_audio", "input_audio": {"data": b64(wav(level)), "format": "wav"}}


def levels(heard):
    """The level of each audio that the stage was given."""
    audios = heard.inputs["audios"]
    assert {audio["sample_rate"] for audio in audios} == {RATE}
    return [round(struct.unpack("<f", audio["audio_data"][:4])[0], 1) for audio in audios]


async def test_audio_parts_are_decoded_and_leave_a_mark_where_they_were(world):
    content = [{"type": "text", "text": "What?"}, part(0.5)]
    await world.chat_json(messages=[{"role": "user", "content": content}])
    assert world.heard.inputs["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "audio"}]}
    ]
    assert levels(world.heard) == [0.5]


async def test_every_audio_has_its_mark_in_the_order_of_the_audios(world):
    messages = [
        {"role": "user", "content": [part(0.1)]},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": [part(0.2)]},
        {"role": "assistant", "content": "Go on."},
    ]
    await world.chat_json(messages=messages, audios=[b64(wav(0.3))])
    assert levels(world.heard) == [0.1, 0.2, 0.3]
    marks = [
        sum(each == {"type": "audio"} for each in message["content"])
        for message in world.heard.inputs["messages"]
    ]
    assert marks == [1, 0, 2, 0]


async def test_audios_alone_are_a_message_of_the_user(world):
    await world.chat_json(messages=[], audios=[b64(wav(0.3))])
    assert world.heard.inputs["messages"] == [{"role": "user", "content": [{"type": "audio"}]}]


async def test_data_urls_are_taken_in_every_place(world):
    url = f"data:audio/wav;base64,{b64(wav(0.4))}"
    content = [{"type": "audio_url", "audio_url": {"url": url}}]
    await world.chat_json(messages=[{"role": "user", "content": content}], audios=[url])
    assert levels(world.heard) == [0.4, 0.4]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("http://127.0.0.1:9/a.wav", "fetches no audio"),
        ("file:///etc/passwd", "reads no local files"),
        ("/etc/passwd.wav", "reads no local files"),
        ("ftp://x/a.wav", "ftp"),
        ("!!!", "base64"),
        (b64(b"no wave"), "WAV"),
    ],
)
async def test_what_is_not_allowed_or_not_audio_is_a_400_that_names_it(world, source, words):
    answer = await world.chat(audios=[source])
    assert answer.status_code == 400
    detail = (await answer.get_json())["detail"]
    assert detail.startswith("audios[0]: ")
    assert words in detail


async def test_a_path_is_read_within_the_allowed_folder_only(world, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "in.wav").write_bytes(wav(0.5))
    (tmp_path / "out.wav").write_bytes(wav(0.5))
    opened = world.with_options(allowed_local_media_path=allowed)
    await opened.chat_json(audios=["in.wav"])
    assert levels(opened.heard) == [0.5]
    for outside in ("../out.wav", str(tmp_path / "out.wav")):
        assert (await opened.chat(audios=[outside])).status_code == 400


async def test_audio_larger_than_the_bound_is_refused(world):
    small = world.with_options(max_media_bytes=40)
    answer = await small.chat(audios=[b64(wav(0.5))])
    assert answer.status_code == 400
    assert "40 bytes" in (await answer.get_json())["detail"]


async def test_a_server_that_does_not_hear_says_so(world):
    deaf = world.with_options(capabilities=frozenset(("chat",)))
    answer = await deaf.chat(messages=MESSAGES, audios=[b64(wav(0.5))])
    assert answer.status_code == 400
    assert "transcription model" in (await answer.get_json())["detail"]


async def test_more_messages_than_any_model_reads_are_refused_before_they_are_read(world):
    answer = await world.chat(messages=[{"role": "user", "content": 5}] * (MAX_MESSAGES + 1))
    assert answer.status_code == 400
    assert f"at most {MAX_MESSAGES}" in (await answer.get_json())["detail"]
