import pytest
import trio

from omni_proxy.config.state import SavedVoices
from omni_proxy.fleet.voices import VoiceRegistry
from omni_proxy.health import voice_list
from omni_proxy.health.voice_list import REFRESH_SECS, VoiceList, names_of
from omni_proxy.upstream_http.client import CallResult

OWNER = "http://a:1"


def told(body, status=200, error=""):
    return CallResult(None, status, body, error, 0.0)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"uploaded_voice_names": ["Bob", 3, "", "a\\u0000b", "\\ud800"]}', ["Bob"]),
        (b'{"uploaded_voices": [{"name": "Bob"}, {}, 4]}', ["Bob"]),
        (b"{}", []),
    ],
)
def test_names_come_in_two_spellings(body, names):
    assert names_of(told(body)) == names


def test_a_worker_without_the_route_has_none():
    assert names_of(told(b"", status=404)) == []


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (told(b"", status=500), "status=500"),
        (told(b"", status=None, error="ConnectError"), "ConnectError"),
        (told(b"[]"), "JSON object"),
        (told(b'{"uploaded_voice_names": 3}'), "no list"),
        (told(b'{"uploaded_voice_names": [%b]}' % b",".join([b'"a"'] * 10_001)), "more than"),
    ],
)
def test_an_answer_without_a_list_says_why(outcome, why):
    with pytest.raises(ValueError, match=why):
        names_of(outcome)


class World:
    """A worker that keeps voices; `calls` has the times at which it was asked."""

    def __init__(self, monkeypatch):
        self.registry = VoiceRegistry()
        self.fleet = {OWNER: object()}
        self.names, self.calls, self.kept = ["bob"], [], []
        self.meanwhile = lambda: None
        monkeypatch.setattr(voice_list, "call_worker", self._ask)

    def find(self, url):
        worker = self.fleet.get(url)
        return worker and type("Found", (), {"url": url})()

    async def _ask(self, worker, call):
        self.calls.append(trio.current_time())
        await trio.sleep(1)
        self.meanwhile()
        if self.names is None:
            return told(b"", status=500)
        return told(
            b'{"uploaded_voice_names": [%b]}'
            % b",".join(b'"%b"' % name.encode() for name in self.names)
        )

    async def remember(self, voices):
        if not self.kept or self.kept[-1] != voices:
            self.kept.append(voices)


@pytest.fixture
async def world(monkeypatch, nursery, autojump_clock):
    made = World(monkeypatch)
    await nursery.start(VoiceList(made, made.registry, made.remember).run)
    return made


async def test_the_list_is_read_after_an_upload_and_kept(world):
    await trio.sleep(5)
    assert world.calls == []
    world.registry.voices_changed(OWNER)
    await trio.sleep(2)
    assert world.registry.names == {"bob"}
    assert world.kept[-2:] == [SavedVoices(owner=OWNER), SavedVoices(owner=OWNER, names=("bob",))]


async def test_it_is_read_again_each_refresh(world):
    world.registry.voices_changed(OWNER)
    await trio.sleep(2)
    world.names = ["ann"]
    await trio.sleep(REFRESH_SECS + 1)
    assert world.registry.names == {"ann"}
    assert len(world.calls) == 2


async def test_an_upload_while_it_is_read_has_it_read_again_at_once(world):
    uploads = iter([lambda: world.registry.voices_changed(OWNER)])
    world.meanwhile = lambda: next(uploads, lambda: None)()
    world.registry.voices_changed(OWNER)
    await trio.sleep(3)
    assert len(world.calls) == 2
    assert world.registry.state == "ready"


async def test_a_failure_is_tried_again_ever_later(world):
    world.names = None
    world.registry.voices_changed(OWNER)
    await trio.sleep(15)
    pauses = [b - a - 1 for a, b in zip(world.calls, world.calls[1:], strict=False)]
    assert pauses[:3] == pytest.approx([1, 2, 4], abs=0.1)
    assert world.registry.refresh_error == "status=500"


async def test_an_owner_that_comes_late_is_asked_once_it_is_there(world):
    worker = world.fleet.pop(OWNER)
    world.registry.restore(OWNER, ["old"])
    world.registry.voices_changed(OWNER)
    await trio.sleep(5)
    assert world.calls == []
    world.fleet[OWNER] = worker
    await trio.sleep(10)
    assert world.registry.names == {"bob"}
