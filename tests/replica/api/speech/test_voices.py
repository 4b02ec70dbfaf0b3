import json
import os

import numpy as np
import pytest
import trio

from omni_proxy.replica.api.speech.voices import (
    StoredVoice,
    StoredVoiceError,
    VoiceStore,
    default_folder,
)
from omni_proxy.replica.audio import encode_wav
from tests.replica.api.audio_stages import Call, open_replica
from tests.replica.api.multipart_bodies import CONTENT_TYPE, form

PATH = "/v1/audio/voices"
RATE = 8000


def tone(seconds, loudness=0.5):
    samples = np.sin(np.arange(int(RATE * seconds)) / 5) * loudness
    return encode_wav(samples.astype(np.float32), RATE)


def upload(name="Anna", consent="yes", sample=None, kind="audio/wav", **fields):
    texts = {"name": name, "consent": consent, **fields}
    data = tone(2) if sample is None else sample
    return form(texts, [("audio_sample", "a.wav", kind, data)])


def body_of(call):
    return json.loads(call.body)


async def test_a_voice_is_stored_listed_and_deleted(tmp_path):
    async with open_replica(voices_dir=tmp_path / "voices") as replica:
        call = await replica.post(
            PATH, upload(ref_text="Hello.", speaker_description=" "), CONTENT_TYPE
        )
        voice = body_of(call)
        assert (call.status, call.headers["content-type"]) == (200, "application/json")
        assert isinstance(voice["created_at"], int)
        assert voice == {
            "name": "anna",
            "consent": "yes",
            "created_at": voice["created_at"],
            "file_size": len(tone(2)),
            "mime_type": "audio/wav",
            "ref_text": "Hello.",
        }
        listed = await (await replica.http.get(PATH)).get_json()
        names = await (await replica.http.get(f"{PATH}?names_only=true")).get_json()
        assert listed == {
            "voices": ["default", "anna"],
            "uploaded_voices": [voice],
            "cache_stats": dict.fromkeys(
                (
                    "entries",
                    "memory_bytes",
                    "max_bytes",
                    "hit_count",
                    "miss_count",
                    "eviction_count",
                    "delete_invalidation_counter",
                ),
                0,
            ),
        }
        assert names == {"uploaded_voice_names": ["anna"]}
        assert (tmp_path / "voices" / "anna.audio").read_bytes() == tone(2)
        deletion = await replica.http.delete(f"{PATH}/ANNA")
        assert deletion.status_code == 200
        assert await deletion.get_json() == {"success": True, "message": "Voice 'anna' deleted"}
        assert list((tmp_path / "voices").iterdir()) == []


async def test_deleting_an_unknown_voice_is_a_404(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    async with open_replica(voices_dir=tmp_path) as replica:
        for name, path in (("zz", "zz"), ("..", "%2e%2e"), ("a b", "a%20b")):
            response = await replica.http.delete(f"{PATH}/{path}")
            if name != "..":
                assert await response.get_json() == {
                    "success": False,
                    "error": f"Voice '{name}' not found",
                }
            assert response.status_code == 404
        assert (await (await replica.http.get(PATH)).get_json())["uploaded_voices"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (upload(name=""), "name"),
        (upload(name="default"), "name"),
        (upload(name="Default"), "name"),
        (upload(name="../up"), "name"),
        (upload(name=".hidden"), "name"),
        (upload(name="a" * 65), "name"),
        (upload(consent=" "), "consent"),
        (upload(ref_text="x" * 4097), "ref_text"),
        (upload(kind="audio/mpeg"), "audio_sample"),
        (upload(kind="text/plain"), "audio_sample"),
        (upload(sample=b""), "audio_sample"),
        (upload(sample=b"RIFFnothing"), "audio_sample"),
        (upload(sample=tone(0.9)), "audio_sample"),
        (upload(sample=tone(30.1)), "audio_sample"),
        (upload(sample=tone(2, loudness=0.0)), "audio_sample"),
        (form({"name": "anna", "consent": "yes"}), "audio_sample"),
    ],
)
async def test_an_invalid_upload_is_refused_and_names_its_field(body, param, tmp_path):
    async with open_replica(voices_dir=tmp_path) as replica:
        call = await replica.post(PATH, body, CONTENT_TYPE)
    assert call.status == 400
    error = body_of(call)["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert list(tmp_path.iterdir()) == []


async def test_a_body_that_is_not_a_form_is_refused(tmp_path):
    async with open_replica(voices_dir=tmp_path) as replica:
        for body, content_type in (
            (b"{}", "application/json"),
            (b"x", "multipart/form-data"),
            (b"no boundary in here", CONTENT_TYPE),
            (upload()[:-30], CONTENT_TYPE),
        ):
            call = await replica.post(PATH, body, content_type)
            assert call.status == 400
            assert list(body_of(call)["error"]) == ["message", "type", "param", "code"]


async def test_an_upload_over_the_limit_is_refused_before_it_is_read(tmp_path):
    limit = 10 * 2**20 + 64 * 2**10
    async with open_replica(voices_dir=tmp_path) as replica:
        call = Call(replica.app, PATH, b"", CONTENT_TYPE)
        call.scope["headers"][1] = (b"content-length", str(limit + 1).encode())
        call._in, call._out = trio.open_memory_channel(1)  # no message is ever received
        with trio.fail_after(30):
            await call.run()
    assert call.status == 413
    error = body_of(call)["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "RequestTooLargeError",
        "audio_sample",
        413,
    )


async def test_an_upload_without_content_length_is_limited_while_it_is_received(tmp_path, nursery):
    async with open_replica(voices_dir=tmp_path) as replica:
        call = Call(replica.app, PATH, upload()[:100], CONTENT_TYPE)
        del call.scope["headers"][1]
        call._in, call._out = trio.open_memory_channel(0)
        nursery.start_soon(call.run)
        with trio.fail_after(30):
            for chunk in (upload()[:-20], *[b"x" * 2**20] * 12):
                with trio.move_on_after(1):
                    message = {"type": "http.request", "body": chunk, "more_body": True}
                    await call._in.send(message)
                if call.ended.is_set():
                    break
            await call.ended.wait()
    assert call.status == 413
    assert body_of(call)["error"]["code"] == 413


async def test_new_voices_stop_at_the_limit_but_a_stored_one_can_be_replaced(tmp_path):
    async with open_replica(voices_dir=tmp_path, max_voices=2) as replica:
        bodies = [upload(name=name) for name in ("a", "b", "c", "A")]
        responses = [await replica.post(PATH, body, CONTENT_TYPE) for body in bodies]
    assert [call.status for call in responses] == [200, 200, 400, 200]
    assert body_of(responses[2])["error"]["param"] == "name"


async def test_a_model_with_one_voice_refuses_uploaded_voices(tmp_path):
    async with open_replica(voices_dir=tmp_path) as replica:
        await replica.post(PATH, upload(name="anna"), CONTENT_TYPE)
        response = await replica.speech(input="x", voice="anna")
        error = (await response.get_json())["error"]
    assert response.status_code == 400
    assert "this model has one voice" in error["message"]


def test_a_crash_before_the_last_rename_leaves_no_voice(tmp_path, monkeypatch):
    store = VoiceStore(tmp_path, 5)
    voice = StoredVoice("anna", "yes", 1, 3, "audio/wav")
    replace = os.replace

    def failing_replace(source, target):
        if target.suffix == ".json":
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="disk full"):
        store.add(voice, b"abc")
    assert store.voices() == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".audio"]  # no temporary file


def test_a_new_store_reads_the_voices_of_the_folder(tmp_path):
    voice = StoredVoice("anna", "yes", 1, 3, "audio/wav", speaker_description="low")
    VoiceStore(tmp_path, 1).add(voice, b"abc")
    (tmp_path / "broken.json").write_bytes(b"{")
    store = VoiceStore(tmp_path, 1)
    assert store.voices() == [voice]
    with pytest.raises(StoredVoiceError):
        store.add(StoredVoice("bert", "yes", 1, 3, "audio/wav"), b"abc")


def test_the_folder_is_set_by_the_environment_or_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"
    monkeypatch.delenv("SPEAKER_SAMPLES_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "omni-proxy" / "voices"
