import pytest
import trio

from omni_proxy.config.state import SavedVoices
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.health.voice_list import REFRESH_SECS, VoiceList, parse_voice_names
from omni_proxy.upstream_http.client import CallResult

OWNER = "http://a:1"


def result_of(body, status=200, error=""):
    return CallResult(None, status, body, error, 0.0)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"uploaded_voice_names": ["Bob", 3, "", "a\\u0000b", "\\ud800"]}', ["Bob"]),
        (b'{"uploaded_voices": [{"name": "Bob"}, {}, 4]}', ["Bob"]),
        (b"{}", []),
    ],
)
def test_voice_names_are_read_in_both_forms(body, names):
    assert parse_voice_names(result_of(body)) == names


def test_a_worker_without_the_route_has_no_voices():
    assert parse_voice_names(result_of(b"", status=404)) == []


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (result_of(b"", status=500), "status=500"),
        (result_of(b"", status=None, error="ConnectError"), "ConnectError"),
        (result_of(b"[]"), "JSON object"),
        (result_of(b'{"uploaded_voice_names": 3}'), "not a list"),
        (result_of(b'{"uploaded_voice_names": [%b]}' % b",".join([b'"a"'] * 10_001)), "more than"),
    ],
)
def test_a_response_without_a_list_is_an_error_with_a_reason(result, reason):
    with pytest.raises(ValueError, match=reason):
        parse_voice_names(result)


class VoiceOwner:
    """A worker that stores voices; `calls` has the times when the list was read."""

    def __init__(self):
        self.registry = VoiceRegistry()
        self.fleet = {OWNER: object()}
        self.names, self.calls, self.saved = ["bob"], [], []
        self.during_read = lambda: None

    def find(self, url):
        worker = self.fleet.get(url)
        return worker and type("Found", (), {"url": url})()

    async def call(self, worker, call):
        self.calls.append(trio.current_time())
        await trio.sleep(1)
        self.during_read()
        if self.names is None:
            return result_of(b"", status=500)
        return result_of(
            b'{"uploaded_voice_names": [%b]}'
            % b",".join(b'"%b"' % name.encode() for name in self.names)
        )

    async def save(self, voices):
        if not self.saved or self.saved[-1] != voices:
            self.saved.append(voices)


@pytest.fixture
async def owner(nursery):
    owner = VoiceOwner()
    await nursery.start(VoiceList(owner, owner.registry, owner.save, owner.call).run)
    return owner


async def test_the_list_is_read_and_saved_after_an_upload(autojump_clock, owner):
    await trio.sleep(5)
    assert owner.calls == []
    owner.registry.voices_changed(OWNER)
    await trio.sleep(2)
    assert owner.registry.names == {"bob"}
    assert owner.saved[-2:] == [SavedVoices(owner=OWNER), SavedVoices(owner=OWNER, names=("bob",))]


async def test_the_list_is_read_again_at_each_refresh(autojump_clock, owner):
    owner.registry.voices_changed(OWNER)
    await trio.sleep(2)
    owner.names = ["ann"]
    await trio.sleep(REFRESH_SECS + 1)
    assert owner.registry.names == {"ann"}
    assert len(owner.calls) == 2


async def test_an_upload_during_a_read_causes_another_read_at_once(autojump_clock, owner):
    uploads = iter([lambda: owner.registry.voices_changed(OWNER)])
    owner.during_read = lambda: next(uploads, lambda: None)()
    owner.registry.voices_changed(OWNER)
    await trio.sleep(3)
    assert len(owner.calls) == 2
    assert owner.registry.state == "ready"


async def test_failed_reads_are_retried_with_backoff(autojump_clock, owner):
    owner.names = None
    owner.registry.voices_changed(OWNER)
    await trio.sleep(15)
    pauses = [b - a - 1 for a, b in zip(owner.calls, owner.calls[1:], strict=False)]
    assert pauses[:3] == pytest.approx([1, 2, 4], abs=0.1)
    assert owner.registry.refresh_error == "status=500"


async def test_an_owner_that_joins_later_is_called_then(autojump_clock, owner):
    worker = owner.fleet.pop(OWNER)
    owner.registry.restore(OWNER, ["old"])
    owner.registry.voices_changed(OWNER)
    await trio.sleep(5)
    assert owner.calls == []
    owner.fleet[OWNER] = worker
    await trio.sleep(10)
    assert owner.registry.names == {"bob"}
