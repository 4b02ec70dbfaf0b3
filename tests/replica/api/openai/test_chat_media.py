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
IMAGE = b"\x89PNG an image"
WITH_OCR = builtin_pipeline(BuiltinOptions(images="ocr"))


def wav(level, count=4):
    return encode_wav(np.full(count, level, np.float32), RATE)


def base64_of(data):
    return base64.b64encode(data).decode()


def part(level):
    return {"type": "input_audio", "input_audio": {"data": base64_of(wav(level)), "format": "wav"}}


def levels(request):
    """The level of each audio in a request that the stage received."""
    audios = request.inputs["audios"]
    assert {audio["sample_rate"] for audio in audios} == {RATE}
    return [round(struct.unpack("<f", audio["audio_data"][:4])[0], 1) for audio in audios]


async def test_audio_parts_are_decoded_and_replaced_by_placeholders(api):
    content = [{"type": "text", "text": "What?"}, part(0.5)]
    await api.chat_json(messages=[{"role": "user", "content": content}])
    assert api.last_request.inputs["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "audio"}]}
    ]
    assert levels(api.last_request) == [0.5]


async def test_every_audio_has_a_placeholder_in_the_order_of_the_audios(api):
    messages = [
        {"role": "user", "content": [part(0.1)]},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": [part(0.2)]},
        {"role": "assistant", "content": "Go on."},
    ]
    await api.chat_json(messages=messages, audios=[base64_of(wav(0.3))])
    assert levels(api.last_request) == [0.1, 0.2, 0.3]
    placeholder_counts = [
        sum(item == {"type": "audio"} for item in message["content"])
        for message in api.last_request.inputs["messages"]
    ]
    assert placeholder_counts == [1, 0, 2, 0]


async def test_audios_without_messages_are_a_user_message(api):
    await api.chat_json(messages=[], audios=[base64_of(wav(0.3))])
    assert api.last_request.inputs["messages"] == [{"role": "user", "content": [{"type": "audio"}]}]


async def test_data_urls_are_accepted_in_parts_and_in_audios(api):
    url = f"data:audio/wav;base64,{base64_of(wav(0.4))}"
    content = [{"type": "audio_url", "audio_url": {"url": url}}]
    await api.chat_json(messages=[{"role": "user", "content": content}], audios=[url])
    assert levels(api.last_request) == [0.4, 0.4]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("http://127.0.0.1:9/a.wav", "fetching audio from"),
        ("file:///etc/passwd", "reads no local files"),
        ("/etc/passwd.wav", "reads no local files"),
        ("ftp://x/a.wav", "ftp"),
        ("!!!", "base64"),
        (base64_of(b"no wave"), "WAV"),
    ],
)
async def test_a_forbidden_or_invalid_audio_source_is_a_400_that_names_it(api, source, reason):
    response = await api.chat(audios=[source])
    assert response.status_code == 400
    detail = (await response.get_json())["detail"]
    assert detail.startswith("audios[0]: ")
    assert reason in detail


async def test_a_path_is_read_within_the_allowed_folder_only(api, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "in.wav").write_bytes(wav(0.5))
    (tmp_path / "out.wav").write_bytes(wav(0.5))
    allowing = api.with_options(allowed_local_media_path=allowed)
    await allowing.chat_json(audios=["in.wav"])
    assert levels(allowing.last_request) == [0.5]
    for outside in ("../out.wav", str(tmp_path / "out.wav")):
        assert (await allowing.chat(audios=[outside])).status_code == 400


async def test_audio_larger_than_the_limit_is_refused(api):
    small = api.with_options(max_media_bytes=40)
    response = await small.chat(audios=[base64_of(wav(0.5))])
    assert response.status_code == 400
    assert "40 bytes" in (await response.get_json())["detail"]


async def test_a_server_without_audio_input_refuses_audio(api):
    deaf = api.with_options(capabilities=frozenset(("chat",)))
    response = await deaf.chat(messages=MESSAGES, audios=[base64_of(wav(0.5))])
    assert response.status_code == 400
    assert "transcription model" in (await response.get_json())["detail"]


async def test_too_many_messages_are_refused_before_they_are_validated(api):
    response = await api.chat(messages=[{"role": "user", "content": 5}] * (MAX_MESSAGES + 1))
    assert response.status_code == 400
    assert f"the limit is {MAX_MESSAGES}" in (await response.get_json())["detail"]


def url(data=IMAGE):
    return f"data:image/png;base64,{base64_of(data)}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": url(), "detail": "low"}},
        {"type": "image_url", "image_url": url()},
        {"type": "input_image", "image_url": url()},
        {"type": "image", "image": url()},
        {"type": "image", "image": base64_of(IMAGE)},
    ],
)
async def test_image_parts_are_decoded_and_replaced_by_placeholders(api, part):
    content = [{"type": "text", "text": "What?"}, part, {"type": "text", "text": "Well?"}]
    await api.chat_json(messages=[{"role": "user", "content": content}])
    assert api.last_request.inputs == {
        "messages": [
            {"role": "user", "content": [content[0], {"type": "image"}, content[2]]},
        ],
        "images": [IMAGE],
    }


async def test_top_level_images_belong_to_the_last_user_message(api):
    part = {"type": "image_url", "image_url": {"url": url(b"first")}}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "user", "content": "And this?"},
        {"role": "assistant", "content": "Hm."},
    ]
    await api.chat_json(messages=messages, images=[base64_of(b"second"), url(b"third")])
    assert api.last_request.inputs["images"] == [b"first", b"second", b"third"]
    contents = [message["content"] for message in api.last_request.inputs["messages"]]
    assert contents == [
        [{"type": "image"}],
        [{"type": "text", "text": "And this?"}, {"type": "image"}, {"type": "image"}],
        "Hm.",
    ]


async def test_images_without_messages_are_a_user_message(api):
    await api.chat_json(messages=[], images=[url()])
    assert api.last_request.inputs["messages"] == [{"role": "user", "content": [{"type": "image"}]}]


async def test_rollouts_accept_images_in_messages(api):
    part = {"type": "image_url", "image_url": {"url": url()}}
    messages = [{"role": "user", "content": [part]}]
    response = await api.post_script("/generate", messages=messages, return_logprob=False)
    assert response.status_code == 200, await response.get_data()
    assert api.last_request.inputs["images"] == [IMAGE]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "http://127.0.0.1:9/a.png",
            "fetching image from 127.0.0.1 is not allowed; send a data:image URL",
        ),
        ("file:///etc/passwd", "reads no local files; send a data:image URL"),
        ("/etc/passwd.png", "reads no local files"),
        ("ftp://x/a.png", "ftp"),
        (f"data:audio/wav;base64,{base64_of(IMAGE)}", "data:image/<type>;base64"),
        ("!!!", "base64"),
    ],
)
async def test_a_forbidden_or_invalid_image_source_is_a_400_that_names_it(api, source, reason):
    response = await api.chat(images=[source])
    assert response.status_code == 400
    detail = (await response.get_json())["detail"]
    assert detail.startswith("images[0]: ")
    assert reason in detail


async def test_an_image_path_is_read_within_the_allowed_folder_only(api, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "in.png").write_bytes(IMAGE)
    (tmp_path / "out.png").write_bytes(IMAGE)
    open_to_files = api.with_options(allowed_local_media_path=allowed)
    await open_to_files.chat_json(images=["in.png"])
    assert open_to_files.last_request.inputs["images"] == [IMAGE]
    for outside in ("../out.png", str(tmp_path / "out.png")):
        assert (await open_to_files.chat(images=[outside])).status_code == 400


async def test_an_image_larger_than_the_limit_is_refused(api):
    response = await api.with_options(max_media_bytes=4).chat(images=[url()])
    assert response.status_code == 400
    assert "4 bytes" in (await response.get_json())["detail"]


async def test_too_many_images_are_refused(api):
    await api.chat_json(images=[url()] * MAX_IMAGES)
    response = await api.chat(images=[url()] * (MAX_IMAGES + 1))
    assert response.status_code == 400
    assert (await response.get_json())["detail"].startswith(f"images[{MAX_IMAGES}]: a request may")


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
async def test_without_vision_the_error_names_the_flag_for_it(tiny, kind):
    blind = tiny.with_options(capabilities=capabilities(TINY))
    parts = [{"type": kind, "image_url": url(), "image": url()}]
    for body in ({"messages": [{"role": "user", "content": parts}]}, {"images": [url()]}):
        response = await blind.chat(**body)
        assert response.status_code == 400
        detail = (await response.get_json())["detail"]
        assert "accepts no images" in detail
        assert "--images ocr" in detail
        assert "pip install 'omni-proxy[ocr]'" in detail


async def test_without_configured_capabilities_the_pipeline_refuses_images(tiny):
    response = await tiny.chat(images=[url()])
    assert response.status_code == 400
    assert "no stage of this pipeline reads images" in (await response.get_json())["detail"]


@needs_reader
async def test_an_image_has_the_same_prompt_as_its_text():
    image = drawn("Invoice 4711", "Total: 42.50 EUR")
    part = {"type": "image_url", "image_url": {"url": url(file_of(image))}}
    as_text = "[text in the image: Invoice 4711\nTotal: 42.50 EUR]"
    async with opened(WITH_OCR, capabilities=capabilities(WITH_OCR)) as api:

        async def complete(content):
            messages = [{"role": "user", "content": content}]
            return await api.chat_json(messages=messages, temperature=0, max_tokens=4)

        question = {"type": "text", "text": "What do I have to pay?"}
        first = await complete(f"{as_text}\n{question['text']}")
        second = await complete([part, question])
        assert second["choices"] == first["choices"]
        usage = second["usage"]
        assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
        # The prompts are equal, so the second one is cached.
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
        broken = await api.chat(messages=MESSAGES, images=[url(b"no image")])
        assert broken.status_code == 400
        assert "images[0]: not an image" in (await broken.get_json())["detail"]
