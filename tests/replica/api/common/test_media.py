import base64
import ssl
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from quart import request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common import media
from omni_proxy.replica.api.common.media import (
    FetchError,
    MediaError,
    MediaRules,
    MultipartError,
    UploadedFile,
    decode_base64,
    fetch_url,
    parse_form,
    read_form,
    read_media,
)
from omni_proxy.shared.tls_client import context_without_authorities
from tests.promises.support.tls_helpers import AUTHORITY, FILES
from tests.replica.api.audio_stages import Call
from tests.replica.api.multipart_bodies import BOUNDARY, CONTENT_TYPE, form

HOST = "localhost"
ALLOWED = (HOST,)
TLS_HELLO = b"\x16"


def url(data=b"sound", kind="audio/wav"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def test_a_data_url_of_audio_is_read():
    assert await read_media(url(), MediaRules()) == b"sound"
    assert await read_media(url(kind="audio/x-wav;rate=8"), MediaRules()) == b"sound"


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
async def test_the_default_rules_allow_no_other_source(source):
    with pytest.raises(MediaError):
        await read_media(source, MediaRules())


async def test_media_over_the_size_limit_is_refused(tmp_path):
    rules = MediaRules(allowed_folder=tmp_path, max_bytes=5)
    (tmp_path / "five").write_bytes(b"12345")
    (tmp_path / "six").write_bytes(b"123456")
    assert await read_media("five", rules) == b"12345"
    assert await read_media(url(b"12345"), rules) == b"12345"
    for source in ("six", url(b"1" * 12)):
        with pytest.raises(MediaError, match="larger than 5"):
            await read_media(source, rules)


async def test_only_files_within_the_allowed_folder_are_read(tmp_path):
    folder = tmp_path / "open"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.wav").write_bytes(b"in")
    (tmp_path / "secret").write_bytes(b"out")
    (folder / "link").symlink_to(tmp_path / "secret")
    rules = MediaRules(allowed_folder=folder)
    for source in ("sub/a b.wav", f"{folder}/sub/a b.wav", f"file://{folder}/sub/a%20b.wav"):
        assert await read_media(source, rules) == b"in"
    for source in ("../secret", f"{tmp_path}/secret", "link", "sub", "gone", "a\0b"):
        with pytest.raises(MediaError, match="no such file"):
            await read_media(source, rules)


def test_base64_is_strict_and_bounded():
    assert decode_base64("c291bmQ=") == b"sound"
    for text in ("c291bmQ", "c2 91", "\u00e9"):
        with pytest.raises(MediaError):
            decode_base64(text)


@asynccontextmanager
async def server(*responses):
    """Answer each connection with the next of `responses`; yields the port and the request heads."""
    heads, remaining = [], list(responses)

    async def serve(stream):
        head = b""
        while b"\r\n\r\n" not in head and not head.startswith(TLS_HELLO):
            head += await stream.receive_some()
        heads.append(head.decode("latin-1"))
        await stream.send_all(remaining.pop(0))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(30):
            yield port, heads
        nursery.cancel_scope.cancel()


def http_response(body=b"", status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_audio_is_fetched_from_an_allowed_domain():
    async with server(http_response(b"sound")) as (port, heads):
        url = f"http://{HOST}:{port}/a%20b.wav?x=1#part"
        assert await fetch_url(url, ALLOWED, 100, allow_private=True) == b"sound"
    assert heads[0].startswith("GET /a%20b.wav?x=1 HTTP/1.1\r\n")
    assert f"Host: {HOST}:{port}\r\n" in heads[0]
    assert "Accept: audio/*\r\n" in heads[0]


async def test_an_image_is_fetched_with_an_accept_header_for_images():
    async with server(http_response(b"image")) as (port, heads):
        url = f"http://{HOST}:{port}/a.png"
        assert await fetch_url(url, ALLOWED, 100, allow_private=True, kind="image") == b"image"
    assert "Accept: image/*\r\n" in heads[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://elsewhere.test/a",
        "http://notlocalhost/a",
        "http://user@localhost/a",
        "http://localhost:x/a",
        "http:///a",
        "http://[::1/a",
    ],
)
async def test_any_other_url_is_refused_without_a_connection(url):
    with pytest.raises(FetchError):
        await fetch_url(url, ALLOWED, 100, allow_private=True)


async def test_an_allowed_domain_with_a_private_address_is_refused():
    async with server() as (port, heads):
        with pytest.raises(FetchError, match="not public"):
            await fetch_url(f"http://{HOST}:{port}/a", ALLOWED, 100)
    assert heads == []


async def test_a_redirect_is_followed_and_checked_like_the_first_url():
    redirect_elsewhere = http_response(status="302 Found", Location="http://elsewhere.test/a")
    redirect = http_response(status="301 Moved", Location="/b")
    async with server(redirect, http_response(b"sound"), redirect_elsewhere) as (port, heads):
        url = f"http://{HOST}:{port}/a"
        assert await fetch_url(url, ALLOWED, 100, allow_private=True) == b"sound"
        assert heads[1].startswith("GET /b ")
        with pytest.raises(FetchError, match=r"elsewhere\.test"):
            await fetch_url(url, ALLOWED, 100, allow_private=True)


async def test_a_redirect_loop_ends_with_an_error():
    redirect = http_response(status="302 Found", Location="/a")
    async with server(*[redirect] * 4) as (port, _):
        with pytest.raises(FetchError, match="redirects more than 3"):
            await fetch_url(f"http://{HOST}:{port}/a", ALLOWED, 100, allow_private=True)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (http_response(b"x" * 11), "larger than 10"),
        (http_response(status="404 Not Found"), "status 404"),
        (b"nonsense\r\n\r\n", "could not be fetched"),
        (
            http_response(b"sound").replace(b"Content-Length: 5", b"Content-Length: 9"),
            "could not be",
        ),
    ],
)
async def test_a_response_that_cannot_be_used_is_a_fetch_error(response, message):
    async with server(response) as (port, _):
        with pytest.raises(FetchError, match=message):
            await fetch_url(f"http://{HOST}:{port}/a", ALLOWED, 10, allow_private=True)


async def test_fetching_from_a_silent_server_times_out(monkeypatch):
    monkeypatch.setattr(media, "FETCH_TIMEOUT_SECS", 0.05)
    with trio.socket.socket() as silent:
        await silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(FetchError, match="could not be fetched within"):
            await fetch_url(f"http://127.0.0.1:{port}/a", ("127.0.0.1",), 10, allow_private=True)


async def test_an_https_url_is_not_fetched_over_plain_http():
    async with server(http_response(b"sound")) as (port, _):
        with pytest.raises(FetchError, match="could not be fetched"):
            await fetch_url(f"https://{HOST}:{port}/a", ALLOWED, 10, allow_private=True)


async def test_an_https_url_is_fetched_with_the_options_of_all_clients(monkeypatch, nursery):
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(FILES / "server.pem", FILES / "server-key.pem")
    own.set_alpn_protocols(["h2", "http/1.1"])
    trusting = context_without_authorities()
    trusting.load_verify_locations(AUTHORITY)
    monkeypatch.setattr(media, "system_context", lambda: trusting)
    chosen = []

    async def serve(stream):
        await stream.receive_some()
        chosen.append(stream.selected_alpn_protocol())
        await stream.send_all(http_response(b"sound"))

    listeners = await nursery.start(trio.serve_ssl_over_tcp, serve, 0, own)
    port = listeners[0].transport_listener.socket.getsockname()[1]
    found = await fetch_url(f"https://{HOST}:{port}/a", ALLOWED, 10, allow_private=True)
    assert (found, chosen) == (b"sound", ["http/1.1"])


async def test_a_body_without_length_ends_with_the_connection():
    async with server(b"HTTP/1.1 200 OK\r\n\r\nsound") as (port, _):
        assert (
            await fetch_url(f"http://{HOST}:{port}/a", ALLOWED, 10, allow_private=True) == b"sound"
        )


async def read_as_route(body, content_type=CONTENT_TYPE, max_bytes=10_000, step=None):
    """Read a form in a route of an app; the body arrives in chunks of `step` bytes."""
    app = QuartTrio(__name__, static_folder=None)
    results = []

    async def route():
        try:
            results.append(await read_form(request, max_bytes))
        except MultipartError as error:
            results.append(error)
        return ""

    app.add_url_rule("/form", "form", route, methods=["POST"])
    call = Call(app, "/form", body, content_type)
    if step:
        call._in, call._out = trio.open_memory_channel(len(body) // step + 2)
        for start in range(0, len(body), step):
            message = {"type": "http.request", "body": body[start : start + step]}
            call._in.send_nowait(message | {"more_body": start + step < len(body)})
    await call.run()
    return results[0]


@pytest.mark.parametrize("step", [None, 1, 7, 64])
async def test_a_form_is_parsed_however_its_body_is_chunked(step):
    data = bytes(range(256)) + b"\r\n--not the boundary\r\n"
    body = form({"name": "Zo\u00eb", "empty": ""}, [("f", "a.wav", "Audio/WAV; x=y", data)])
    parsed = await read_as_route(body, step=step)
    assert parsed.fields == {"name": "Zo\u00eb", "empty": ""}
    assert parsed.files == {"f": UploadedFile("a.wav", "audio/wav", data)}


@given(
    st.dictionaries(st.text("abc", min_size=1), st.text(max_size=20), max_size=3),
    st.lists(st.sampled_from([b"\r", b"\n", b"--", BOUNDARY.encode()[:-1], b"x", b"\0"])),
)
def test_the_fields_and_files_of_a_form_are_parsed_unchanged(fields, pieces):
    data = b"".join(pieces)
    body = form(fields, [("file", "a", "audio/wav", data)])
    parsed = parse_form(body, BOUNDARY)
    assert parsed.fields == fields
    assert parsed.files["file"].data == data


@given(st.integers(0, 200))
def test_a_truncated_form_is_refused(cut):
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
async def test_an_invalid_or_too_large_form_is_refused(body, content_type, status):
    error = await read_as_route(body, content_type)
    assert error.status == status


async def test_a_text_field_is_limited_and_must_be_utf_8():
    assert (await read_as_route(form({"a": "x" * 65_537}), max_bytes=10**6)).status == 413
    latin = form({"a": "?"}).replace(b"?", b"\xff")
    assert (await read_as_route(latin)).status == 400
