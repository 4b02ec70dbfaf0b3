import base64

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from quart import request
from quart_trio import QuartTrio

from omni_proxy.replica.api.audio_forms import (
    FilePart,
    FormRefused,
    ReferenceRefused,
    ReferenceRules,
    decode_base64,
    parse_form,
    read_form,
    read_reference,
)
from tests.replica.api.forms import BOUNDARY, CONTENT_TYPE, form
from tests.replica.api.sound_stages import Call


async def read(body, content_type=CONTENT_TYPE, most_bytes=10_000, step=None):
    """Read a form as a route does, its bytes coming `step` at a time."""
    app = QuartTrio(__name__, static_folder=None)
    found = []

    async def route():
        try:
            found.append(await read_form(request, most_bytes))
        except FormRefused as refused:
            found.append(refused)
        return ""

    app.add_url_rule("/form", "form", route, methods=["POST"])
    call = Call(app, "/form", body, content_type)
    if step:
        call._in, call._out = trio.open_memory_channel(len(body) // step + 2)
        for at in range(0, len(body), step):
            piece = {"type": "http.request", "body": body[at : at + step]}
            call._in.send_nowait(piece | {"more_body": at + step < len(body)})
    await call.run()
    return found[0]


@pytest.mark.parametrize("step", [None, 1, 7, 64])
async def test_a_form_is_read_however_its_bytes_come(step):
    data = bytes(range(256)) + b"\r\n--not the boundary\r\n"
    body = form({"name": "Zo\u00eb", "empty": ""}, [("f", "a.wav", "Audio/WAV; x=y", data)])
    found = await read(body, step=step)
    assert found.fields == {"name": "Zo\u00eb", "empty": ""}
    assert found.files == {"f": FilePart("a.wav", "audio/wav", data)}


@given(
    st.dictionaries(st.text("abc", min_size=1), st.text(max_size=20), max_size=3),
    st.lists(st.sampled_from([b"\r", b"\n", b"--", BOUNDARY.encode()[:-1], b"x", b"\0"])),
)
def test_what_a_form_holds_is_found_again(fields, pieces):
    data = b"".join(pieces)
    body = form(fields, [("file", "a", "audio/wav", data)])
    found = parse_form(body, BOUNDARY)
    assert found.fields == fields
    assert found.files["file"].data == data


@given(st.integers(0, 200))
def test_a_form_that_is_cut_anywhere_is_refused(cut):
    body = form({"a": "b"}, [("file", "a", "audio/wav", b"\r\nsound\r\n")])
    end = body.rindex(BOUNDARY.encode()) + len(BOUNDARY) + 2
    with pytest.raises(FormRefused):
        parse_form(body[: min(cut, end - 1)], BOUNDARY)


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (form({"a": "b"}), "application/json", 400),
        (form({"a": "b"}), "multipart/form-data", 400),
        (form({"a": "b"})[:-20], CONTENT_TYPE, 400),
        (b"", CONTENT_TYPE, 400),
        (form({"a": "x" * 10_000}), CONTENT_TYPE, 413),
        (form({f"field {n}": "" for n in range(65)}), CONTENT_TYPE, 413),
    ],
)
async def test_a_form_that_cannot_be_read_is_refused(body, content_type, status):
    refused = await read(body, content_type)
    assert refused.status == status


async def test_a_plain_field_is_bounded_and_must_be_text():
    assert (await read(form({"a": "x" * 65_537}), most_bytes=10**6)).status == 413
    latin = form({"a": "?"}).replace(b"?", b"\xff")
    assert (await read(latin)).status == 400


def url(data=b"sound", kind="audio/wav"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def test_a_data_url_of_audio_is_taken():
    assert await read_reference(url(), ReferenceRules()) == b"sound"
    assert await read_reference(url(kind="audio/x-wav;rate=8"), ReferenceRules()) == b"sound"


@pytest.mark.parametrize(
    "source",
    [
        url(kind="text/plain"),
        "data:audio/wav,sound",
        "data:audio/wav;base64",
        "data:audio/wav;base64,***",
        "ftp://host/a.wav",
        "file://host/a.wav",
        "file:///etc/hostname",
        "/etc/hostname",
        "a.wav",
        "http://example.com/a.wav",
        "https://127.0.0.1/a.wav",
        "",
    ],
)
async def test_nothing_else_is_read_without_rules(source):
    with pytest.raises(ReferenceRefused):
        await read_reference(source, ReferenceRules())


async def test_a_reference_beyond_its_size_is_refused(tmp_path):
    rules = ReferenceRules(allowed_folder=tmp_path, most_bytes=5)
    (tmp_path / "five").write_bytes(b"12345")
    (tmp_path / "six").write_bytes(b"123456")
    assert await read_reference("five", rules) == b"12345"
    assert await read_reference(url(b"12345"), rules) == b"12345"
    for source in ("six", url(b"1" * 12)):
        with pytest.raises(ReferenceRefused, match="larger than 5"):
            await read_reference(source, rules)


async def test_files_are_read_within_the_open_folder_alone(tmp_path):
    folder = tmp_path / "open"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.wav").write_bytes(b"in")
    (tmp_path / "secret").write_bytes(b"out")
    (folder / "link").symlink_to(tmp_path / "secret")
    rules = ReferenceRules(allowed_folder=folder)
    for source in ("sub/a b.wav", f"{folder}/sub/a b.wav", f"file://{folder}/sub/a%20b.wav"):
        assert await read_reference(source, rules) == b"in"
    for source in ("../secret", f"{tmp_path}/secret", "link", "sub", "gone", "a\0b"):
        with pytest.raises(ReferenceRefused, match="no such file"):
            await read_reference(source, rules)


def test_base64_is_strict_and_bounded():
    assert decode_base64("c291bmQ=") == b"sound"
    for text in ("c291bmQ", "c2 91", "\u00e9"):
        with pytest.raises(ReferenceRefused):
            decode_base64(text)
