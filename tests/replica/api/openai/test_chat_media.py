import base64
import struct

import numpy as np
import pytest

from omni_proxy.replica.api.openai.to_generate_request import MAX_IMAGES, MAX_MESSAGES
from omni_proxy.replica.audio import encode_wav
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline, capabilities
from tests.replica.api.api_fixture import MESSAGES, TINY, opened
from tests.replica.models.drawn_images import drawn, file_of, needs_reader

RATE = 8000
BYTES = b"\x89PNG an image"
SEES = builtin_pipeline(BuiltinOptions(images="ocr"))


def wav(level, count=4):
    return encode_wav(np.full(count, level, np.float32), RATE)


def b64(data):
    return base64.b64encode(data).decode()


def part(level):
    return {"type": "input_audio", "input_audio": {"data": b64(wav(level)), "format": "wav"}}


def levels(heard):
    """The level of each audio of the stage's request."""
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
        ("http://127.0.0.1:9/a.wav", "fetching audio from"),
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


async def test_a_server_without_audio_input_refuses_audio(world):
    deaf = world.with_options(capabilities=frozenset(("chat",)))
    answer = await deaf.chat(messages=MESSAGES, audios=[b64(wav(0.5))])
    assert answer.status_code == 400
    assert "transcription model" in (await answer.get_json())["detail"]


async def test_more_messages_than_any_model_reads_are_refused_before_they_are_read(world):
    answer = await world.chat(messages=[{"role": "user", "content": 5}] * (MAX_MESSAGES + 1))
    assert answer.status_code == 400
    assert f"the limit is {MAX_MESSAGES}" in (await answer.get_json())["detail"]


def url(data=BYTES):
    return f"data:image/png;base64,{b64(data)}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": url(), "detail": "low"}},
        {"type": "image_url", "image_url": url()},
        {"type": "input_image", "image_url": url()},
        {"type": "image", "image": url()},
        {"type": "image", "image": b64(BYTES)},
    ],
)
async def test_image_parts_are_unpacked_and_leave_a_mark_where_they_were(world, part):
    content = [{"type": "text", "text": "What?"}, part, {"type": "text", "text": "Well?"}]
    await world.chat_json(messages=[{"role": "user", "content": content}])
    assert world.heard.inputs == {
        "messages": [
            {"role": "user", "content": [content[0], {"type": "image"}, content[2]]},
        ],
        "images": [BYTES],
    }


async def test_listed_images_and_audios_belong_to_the_last_user_message(world):
    part = {"type": "image_url", "image_url": {"url": url(b"first")}}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "user", "content": "And this?"},
        {"role": "assistant", "content": "Hm."},
    ]
    await world.chat_json(messages=messages, images=[b64(b"second"), url(b"third")])
    assert world.heard.inputs["images"] == [b"first", b"second", b"third"]
    marks = [each["content"] for each in world.heard.inputs["messages"]]
    assert marks == [
        [{"type": "image"}],
        [{"type": "text", "text": "And this?"}, {"type": "image"}, {"type": "image"}],
        "Hm.",
    ]


async def test_images_alone_are_a_message_of_the_user(world):
    await world.chat_json(messages=[], images=[url()])
    assert world.heard.inputs["messages"] == [{"role": "user", "content": [{"type": "image"}]}]


async def test_rollouts_take_images_in_messages_too(world):
    part = {"type": "image_url", "image_url": {"url": url()}}
    messages = [{"role": "user", "content": [part]}]
    answer = await world.ask("/generate", messages=messages, return_logprob=False)
    assert answer.status_code == 200, await answer.get_data()
    assert world.heard.inputs["images"] == [BYTES]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "http://127.0.0.1:9/a.png",
            "fetching image from 127.0.0.1 is not allowed; send a data:image URL",
        ),
        ("file:///etc/passwd", "reads no local files; send a data:image URL"),
        ("/etc/passwd.png", "reads no local files"),
        ("ftp://x/a.png", "ftp"),
        (f"data:audio/wav;base64,{b64(BYTES)}", "data:image/<type>;base64"),
        ("!!!", "base64"),
    ],
)
async def test_what_is_not_allowed_is_a_400_that_names_it(world, source, words):
    answer = await world.chat(images=[source])
    assert answer.status_code == 400
    detail = (await answer.get_json())["detail"]
    assert detail.startswith("images[0]: ")
    assert words in detail


async def test_an_image_path_is_read_within_the_allowed_folder_only(world, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "in.png").write_bytes(BYTES)
    (tmp_path / "out.png").write_bytes(BYTES)
    open_to_files = world.with_options(allowed_local_media_path=allowed)
    await open_to_files.chat_json(images=["in.png"])
    assert open_to_files.heard.inputs["images"] == [BYTES]
    for outside in ("../out.png", str(tmp_path / "out.png")):
        assert (await open_to_files.chat(images=[outside])).status_code == 400


async def test_an_image_larger_than_the_bound_is_refused(world):
    answer = await world.with_options(max_media_bytes=4).chat(images=[url()])
    assert answer.status_code == 400
    assert "4 bytes" in (await answer.get_json())["detail"]


async def test_more_images_than_are_read_at_once_are_refused(world):
    await world.chat_json(images=[url()] * MAX_IMAGES)
    answer = await world.chat(images=[url()] * (MAX_IMAGES + 1))
    assert answer.status_code == 400
    assert (await answer.get_json())["detail"].startswith(f"images[{MAX_IMAGES}]: a request may")


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
async def test_a_server_without_vision_names_the_flag_for_it(tiny, kind):
    blind = tiny.with_options(capabilities=capabilities(TINY))
    parts = [{"type": kind, "image_url": url(), "image": url()}]
    for body in ({"messages": [{"role": "user", "content": parts}]}, {"images": [url()]}):
        answer = await blind.chat(**body)
        assert answer.status_code == 400
        detail = (await answer.get_json())["detail"]
        assert "accepts no images" in detail
        assert "--images ocr" in detail
        assert "pip install 'omni-proxy[ocr]'" in detail


async def test_a_pipeline_that_is_not_known_refuses_images_itself(tiny):
    answer = await tiny.chat(images=[url()])
    assert answer.status_code == 400
    assert "no stage of this pipeline reads images" in (await answer.get_json())["detail"]


@needs_reader
async def test_the_model_reads_what_is_in_the_image():
    image = drawn("Invoice 4711", "Total: 42.50 EUR")
    part = {"type": "image_url", "image_url": {"url": url(file_of(image))}}
    typed = "[text in the image: Invoice 4711\nTotal: 42.50 EUR]"
    async with opened(SEES, capabilities=capabilities(SEES)) as world:

        async def asked(content):
            messages = [{"role": "user", "content": content}]
            return await world.chat_json(messages=messages, temperature=0, max_tokens=4)

        question = {"type": "text", "text": "What do I have to pay?"}
        first = await asked(f"{typed}\n{question['text']}")
        second = await asked([part, question])
        assert second["choices"] == first["choices"]
        usage = second["usage"]
        assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
        # All of it was cached: it is the same prompt.
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
        broken = await world.chat(messages=MESSAGES, images=[url(b"no image")])
        assert broken.status_code == 400
        assert "images[0]: not an image" in (await broken.get_json())["detail"]
