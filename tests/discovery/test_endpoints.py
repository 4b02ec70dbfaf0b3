from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.overlay import Discovered, FoundWorker
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.discovery.endpoints import (
    DiscoveryState,
    ReportedEndpoint,
    SourceEndpoints,
    combine,
)

URLS = [f"http://10.0.0.{n}:1" for n in range(3)]


def reported(uid: str, url: str = URLS[0], *, ready: bool = True, source: str = "s", **settings):
    entry = WorkerEntry(url=url, **settings)
    return ReportedEndpoint(FoundWorker(entry, Discovered(source, uid)), ready)


def states(endpoints: SourceEndpoints) -> dict[tuple[str, str], DiscoveryState]:
    return {(endpoint.uid, endpoint.url): endpoint.state for endpoint in endpoints}


def test_an_endpoint_that_was_never_ready_is_not_visible():
    endpoints = SourceEndpoints()
    assert endpoints.put("u", [reported("u", ready=False)], "not ready", 0) == []
    assert combine([endpoints]) == ()
    assert endpoints.put("u", [], "gone", 1) == []
    assert list(endpoints) == []


def test_an_endpoint_that_was_open_leaves_and_can_return():
    endpoints = SourceEndpoints()
    (endpoint,) = endpoints.put("u", [reported("u")], "", 0)
    assert endpoint.state is DiscoveryState.OPEN
    (held,) = endpoints.put("u", [reported("u", ready=False)], "not ready", 1)
    assert (held is endpoint, held.state, held.reason) == (
        True,
        DiscoveryState.NOT_READY,
        "not ready",
    )
    endpoints.put("u", [], "gone", 2)
    assert (endpoint.state, endpoint.since, endpoint.reason) == (DiscoveryState.LEAVING, 2, "gone")
    assert len(combine([endpoints])) == 1
    endpoints.put("u", [reported("u")], "", 3)
    assert (endpoint.state, endpoint.reason) == (DiscoveryState.OPEN, "")
    endpoints.put("u", [], "gone", 4)
    endpoints.forget(endpoint)
    assert combine([endpoints]) == ()


def test_only_changes_are_returned():
    endpoints = SourceEndpoints()
    endpoints.put("u", [reported("u")], "", 0)
    assert endpoints.put("u", [reported("u")], "", 1) == []
    (changed,) = endpoints.put("u", [reported("u", model="m")], "", 2)
    assert (changed.found.entry.model, changed.since) == ("m", 0)


def test_of_two_endpoints_at_one_address_the_newest_that_stays_is_chosen():
    endpoints, other = SourceEndpoints(), SourceEndpoints()
    endpoints.put("old", [reported("old")], "", 0)
    endpoints.put("new", [reported("new")], "", 1)
    assert [each.discovered.uid for each in combine([endpoints])] == ["new"]
    endpoints.put("new", [], "gone", 2)
    assert [each.discovered.uid for each in combine([endpoints])] == ["old"]
    other.put("x", [reported("x", source="t")], "", 3)
    assert [each.discovered.uid for each in combine([endpoints, other])] == ["old"]
    endpoints.put("old", [], "gone", 4)
    assert [each.discovered.uid for each in combine([endpoints, other])] == ["x"]


SEEN = st.lists(
    st.tuples(st.sampled_from(URLS), st.booleans()), max_size=2, unique_by=lambda each: each[0]
)
STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), SEEN)
    | st.dictionaries(st.sampled_from("abc"), SEEN, max_size=3)
    | st.just("forget"),
    max_size=12,
)


class Model:
    """A simple model: the states by uid and URL."""

    def __init__(self):
        self.states = {}

    def put(self, uid, seen):
        for url, ready in seen:
            before = self.states.get((uid, url))
            state_if_not_ready = (
                DiscoveryState.PENDING
                if before in (None, DiscoveryState.PENDING)
                else DiscoveryState.NOT_READY
            )
            self.states[uid, url] = DiscoveryState.OPEN if ready else state_if_not_ready
        for key in [key for key in self.states if key[0] == uid and key[1] not in dict(seen)]:
            if self.states[key] is DiscoveryState.PENDING:
                del self.states[key]
            else:
                self.states[key] = DiscoveryState.LEAVING

    def forget(self):
        self.states = {
            key: state for key, state in self.states.items() if state is not DiscoveryState.LEAVING
        }


def take(endpoints: SourceEndpoints, model: Model, step, now: float):
    """Applies a step to both; returns what the endpoints report as changed."""
    if step == "forget":
        for endpoint in endpoints.leaving():
            endpoints.forget(endpoint)
        model.forget()
        return []
    listed = step if isinstance(step, dict) else {step[0]: step[1]}
    endpoints_by_uid = {
        uid: [reported(uid, url, ready=ready) for url, ready in rows]
        for uid, rows in listed.items()
    }
    for uid in "abc" if isinstance(step, dict) else step[0]:
        model.put(uid, listed.get(uid, []))
    if isinstance(step, dict):
        return endpoints.replace(endpoints_by_uid, "gone", now)
    return endpoints.put(step[0], endpoints_by_uid[step[0]], "", now)


@given(steps=STEPS)
def test_endpoints_behave_like_a_simple_model(steps):
    endpoints, model = SourceEndpoints(), Model()
    for now, step in enumerate(steps):
        before = dict(model.states)
        changed = take(endpoints, model, step, now)
        assert states(endpoints) == model.states
        visible = {
            key: state for key, state in model.states.items() if state is not DiscoveryState.PENDING
        }
        moved = {key for key, state in visible.items() if state is not before.get(key)}
        assert {(each.uid, each.url) for each in changed} == moved
        assert {each.entry.url for each in combine([endpoints])} == {url for _, url in visible}
