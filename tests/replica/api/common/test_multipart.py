import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from quart import request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.multipart import (
    MultipartError,
    UploadedFile,
    parse_form,
    read_form,
)
from tests.replica.api.audio_stages import Call
from tests.replica.api.multipart_bodies import BOUNDARY, CONTENT_TYPE, form


async def read(body, content_type=CONTENT_TYPE, most_bytes=10_000, step=None):
    """Read a form as a route does, its bytes coming `step` at a time."""
    app = QuartTrio(__name__, static_folder=None)
    found = []

    async def route():
        try:
            found.append(await read_form(request, most_bytes))
        except MultipartError as refused:
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
async def test_a_form_is_parsed_for_any_chunking(step):
    data = bytes(range(256)) + b"\r\n--not the boundary\r\n"
    body = form({"name": "Zo\u00eb", "empty": ""}, [("f", "a.wav", "Audio/WAV; x=y", data)])
    found = await read(body, step=step)
    assert found.fields == {"name": "Zo\u00eb", "empty": ""}
    assert found.files == {"f": UploadedFile("a.wav", "audio/wav", data)}


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
    with pytest.raises(MultipartError):
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
