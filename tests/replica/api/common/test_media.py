import base64

import pytest

from omni_proxy.replica.api.common.media import MediaError, MediaRules, decode_base64, read_media


def url(data=b"sound", kind="audio/wav"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def test_a_data_url_of_audio_is_taken():
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
async def test_nothing_else_is_read_without_rules(source):
    with pytest.raises(MediaError):
        await read_media(source, MediaRules())


async def test_a_reference_beyond_its_size_is_refused(tmp_path):
    rules = MediaRules(allowed_folder=tmp_path, most_bytes=5)
    (tmp_path / "five").write_bytes(b"12345")
    (tmp_path / "six").write_bytes(b"123456")
    assert await read_media("five", rules) == b"12345"
    assert await read_media(url(b"12345"), rules) == b"12345"
    for source in ("six", url(b"1" * 12)):
        with pytest.raises(MediaError, match="larger than 5"):
            await read_media(source, rules)


async def test_files_are_read_within_the_open_folder_alone(tmp_path):
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
