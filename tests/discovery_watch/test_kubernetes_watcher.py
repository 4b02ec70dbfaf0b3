"""The pod watcher against the tests' API server, which fails in the ways that a real one fails."""

import json
import logging

import pytest
import trio

from omni_proxy.config.parse import parse
from omni_proxy.discovery_watch import kubernetes_watcher
from omni_proxy.discovery_watch.api_connection import ClusterAccess
from omni_proxy.discovery_watch.kubernetes_watcher import KubernetesWatcher
from tests.discovery_watch.api_server import pod


class Watched:
    """A running watcher; `found` has the state of each pod."""

    def __init__(self, url, more="", namespace="default"):
        text = f'[[discover]]\napi_server = "{url}"\nnamespace = "{namespace}"\n{more}'
        entry = parse(text).discover[0]
        self.watcher = KubernetesWatcher(entry, ClusterAccess(entry), self._note, lambda: 0.0)
        self.changes = []

    def _note(self, changed):
        self.changes += [
            (endpoint.found.discovered.pod, endpoint.state.value) for endpoint in changed
        ]

    @property
    def status(self):
        return self.watcher.status

    def found(self):
        return {
            endpoint.found.discovered.pod: endpoint.state.value
            for endpoint in self.watcher.state.endpoints
        }

    async def until(self, **expected):
        await self.until_holds(lambda: self.found() == expected)

    async def until_holds(self, holds):
        with trio.fail_after(20):
            while not holds():  # noqa: ASYNC110  another task watches
                await trio.sleep(0.005)


@pytest.fixture
def watching(api, nursery):
    def start(more="", namespace="default"):
        watched = Watched(api.url, more, namespace)
        nursery.start_soon(watched.watcher.run)
        return watched

    return start


async def test_workers_come_from_a_list_and_then_from_events(api, watching):
    api.put(pod("a"))
    api.put(pod("b", labels={"app": "vllm"}))
    watched = watching()
    await watched.until(a="open")
    api.put(pod("c", ready=False))
    await watched.until(a="open", c="pending")
    api.ready("uid-c", True)
    api.ready("uid-a", False)
    await watched.until(a="not_ready", c="open")
    api.begin_deletion("uid-c")
    api.label("uid-a", app="vllm")
    await watched.until(a="leaving", c="leaving")
    assert (api.lists(), watched.status.state) == (1, "synced")
    path, query, _ = api.requests[-1]
    assert path == "/api/v1/namespaces/default/pods"
    assert (query["watch"], query["allowWatchBookmarks"], query["labelSelector"]) == (
        "1",
        "true",
        "app=sglang",
    )


async def test_all_namespaces_are_watched_with_namespace_star(api, watching):
    api.put(pod("a", namespace="one"))
    api.put(pod("b", namespace="two"))
    watched = watching(namespace="*")
    await watched.until(a="open", b="open")
    assert {path for path, _, _ in api.requests} == {"/api/v1/pods"}


@pytest.fixture
def three_pages(api, monkeypatch):
    """Pods that fill two pages and a half."""
    monkeypatch.setattr(kubernetes_watcher, "PAGE_PODS", 10)
    for number in range(25):
        api.put(pod(f"p{number}", ip=f"10.0.0.{number}"))
    return 25


async def test_a_long_list_is_read_in_pages(api, three_pages, watching):
    watched = watching()
    await watched.until_holds(lambda: len(watched.found()) == three_pages)
    assert api.lists() == 3


async def test_an_expired_page_restarts_the_list(api, three_pages, watching):
    api.faults.page_gone = True
    watched = watching()
    await watched.until_holds(lambda: len(watched.found()) == three_pages)
    assert watched.status.failures == 0


async def test_a_list_without_pages_is_read(api, three_pages, watching):
    api.faults.ignore_limit = True
    watched = watching()
    await watched.until_holds(lambda: len(watched.found()) == three_pages)
    assert api.lists() == 1


async def test_a_broken_watch_continues_at_its_version(api, watching):
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    api.cut_watches()
    api.put(pod("b"))
    await watched.until(a="open", b="open")
    assert api.lists() == 1
    assert watched.changes == [("a", "open"), ("b", "open")]
    assert watched.status.state == "synced"


async def test_a_truncated_event_is_ignored(api, watching):
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    line = json.dumps({"type": "DELETED", "object": pod("a")}).encode()
    await api.send_raw(line[:200])
    api.cut_watches()
    api.put(pod("b"))
    await watched.until(a="open", b="open")
    assert api.lists() == 1
    assert watched.changes == [("a", "open"), ("b", "open")]


@pytest.mark.parametrize("how", ["event", "answer"])
async def test_a_version_that_is_too_old_leads_to_a_new_list(api, watching, how):
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    if how == "event":
        await api.expire_watches()
    else:
        api.faults.without_events = True
        api.put(pod("c"))
        api.delete("uid-c")
        api.forget_history()
        api.faults.without_events = False
        api.cut_watches()
    await watched.until_holds(lambda: api.lists() == 2)
    api.put(pod("b"))
    await watched.until(a="open", b="open")
    assert watched.status.failures <= 1


async def test_a_new_list_retires_pods_that_were_deleted_meanwhile(api, watching):
    for name in ("a", "b"):
        api.put(pod(name, ip="10.0.0.1" if name == "a" else "10.0.0.2"))
    watched = watching()
    await watched.until(a="open", b="open")
    await watched.until_holds(lambda: api.watches)
    api.faults.without_events = True
    api.delete("uid-a")
    api.put(pod("a", "other", ip="10.0.0.1"))
    await api.expire_watches()
    await watched.until_holds(lambda: len(list(watched.watcher.state.endpoints)) == 3)
    assert {endpoint.uid: endpoint.state.value for endpoint in watched.watcher.state.endpoints} == {
        "uid-a": "leaving", "other": "open", "uid-b": "open",
    }  # fmt: skip


async def test_a_bookmark_advances_the_version(api, watching):
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    for _ in range(3):
        api.put(pod("x", labels={"app": "other"}))
    await api.bookmark()
    await watched.until_holds(lambda: watched.status.events["BOOKMARK"])
    api.cut_watches()
    await watched.until_holds(lambda: sum("watch" in query for _, query, _ in api.requests) == 2)
    assert api.requests[-1][1]["resourceVersion"] == str(api.version)


async def test_a_silent_watch_is_restarted(api, watching):
    api.put(pod("a"))
    watched = watching()
    watched.watcher.silence_secs = 0.05
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    api.faults.without_events = True
    api.put(pod("b"))
    await watched.until_holds(lambda: sum("watch" in query for _, query, _ in api.requests) > 2)
    api.faults.without_events = False
    await watched.until(a="open", b="open")
    assert (api.lists(), watched.status.failures) == (1, 0)


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_refusal_keeps_the_last_list_and_is_shown(api, watching, status, caplog):
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    api.faults.status = status
    api.cut_watches()
    api.delete("uid-a")
    with caplog.at_level(logging.WARNING):
        await watched.until_holds(
            lambda: f"status {status}: pods is refused" in watched.status.error
        )
    assert (watched.found(), watched.status.state) == ({"a": "open"}, "stale")
    assert "discovery_failed source=pods" in caplog.text
    api.faults.status = 0
    await watched.until(a="leaving")
    assert (watched.status.state, watched.status.error) == ("synced", "")


async def test_a_server_that_refuses_watches_is_listed_repeatedly(api, watching):
    api.faults.watch_status = 403
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    api.delete("uid-a")
    await watched.until(a="leaving")
    assert api.lists() > 1


async def test_pauses_between_failures_grow(api, watching, monkeypatch):
    pauses = []
    sleep = trio.sleep

    async def record_pause(secs):
        pauses.append(secs)
        await sleep(0)

    monkeypatch.setattr(kubernetes_watcher.trio, "sleep", record_pause)
    api.faults.status = 503
    watching()
    with trio.fail_after(20):
        while len(pauses) < 12:
            await sleep(0.005)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == kubernetes_watcher.MAX_PAUSE_SECS / 2


async def test_a_server_whose_watches_are_always_410_is_listed_with_growing_pauses(
    api, watching, monkeypatch
):
    pauses = []
    sleep = trio.sleep

    async def record_pause(secs):
        pauses.append(secs)
        await sleep(0)

    monkeypatch.setattr(kubernetes_watcher.trio, "sleep", record_pause)
    api.put(pod("a"))
    api.faults.watch_status = 410
    watched = watching()
    with trio.fail_after(20):
        while len(pauses) < 12:
            await sleep(0.005)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == kubernetes_watcher.MAX_PAUSE_SECS / 2
    assert (watched.found(), watched.status.state) == ({"a": "open"}, "synced")
    api.put(pod("b"))  # lists still find new pods
    with trio.fail_after(20):
        while watched.found() != {"a": "open", "b": "open"}:
            await sleep(0.005)


async def test_a_truncated_list_changes_nothing(api, watching):
    api.faults.cut_list = 150
    api.put(pod("a"))
    watched = watching()
    await watched.until_holds(lambda: watched.status.error)
    assert (watched.found(), watched.status.state) == ({}, "failing")
    api.faults.cut_list = 0
    await watched.until(a="open")


@pytest.mark.parametrize(
    "line",
    [b"{}\n", b"[]\n", b"no json\n", b'{"type": "ADDED", "object": 7}\n', b"[" * 100_000 + b"\n"],
)
async def test_an_invalid_event_leads_to_a_new_list(api, watching, line):
    api.put(pod("a"))
    watched = watching()
    await watched.until(a="open")
    await watched.until_holds(lambda: api.watches)
    await api.send_raw(line)
    await watched.until_holds(lambda: api.lists() == 2)
    assert watched.found() == {"a": "open"}


async def test_an_unreachable_server_is_a_failure(nursery):
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    await listener.aclose()
    watched = Watched(url)
    nursery.start_soon(watched.watcher.run)
    await watched.until_holds(lambda: "Connection refused" in watched.status.error)
    assert watched.status.state == "failing"
