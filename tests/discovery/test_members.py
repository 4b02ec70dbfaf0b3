from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.overlay import Discovered, FoundWorker
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.discovery.members import DiscoveryState, SourceEndpoint, SourceMembers, combine

URLS = [f"http://10.0.0.{n}:1" for n in range(3)]


def endpoint(uid: str, url: str = URLS[0], *, ready: bool = True, source: str = "s", **settings):
    entry = WorkerEntry(url=url, **settings)
    return SourceEndpoint(FoundWorker(entry, Discovered(source, uid)), ready)


def states(members: SourceMembers) -> dict[tuple[str, str], DiscoveryState]:
    return {(member.uid, member.url): member.state for member in members}


def test_an_endpoint_that_was_never_ready_is_not_a_member_of_the_fleet():
    members = SourceMembers()
    assert members.put("u", [endpoint("u", ready=False)], "not ready", 0) == []
    assert combine([members]) == ()
    assert members.put("u", [], "gone", 1) == []
    assert list(members) == []


def test_an_endpoint_that_was_open_leaves_and_can_return():
    members = SourceMembers()
    (member,) = members.put("u", [endpoint("u")], "", 0)
    assert member.state is DiscoveryState.OPEN
    (held,) = members.put("u", [endpoint("u", ready=False)], "not ready", 1)
    assert (held is member, held.state, held.reason) == (
        True,
        DiscoveryState.NOT_READY,
        "not ready",
    )
    members.put("u", [], "gone", 2)
    assert (member.state, member.since, member.reason) == (DiscoveryState.LEAVING, 2, "gone")
    assert len(combine([members])) == 1
    members.put("u", [endpoint("u")], "", 3)
    assert (member.state, member.reason) == (DiscoveryState.OPEN, "")
    members.put("u", [], "gone", 4)
    members.forget(member)
    assert combine([members]) == ()


def test_only_changes_are_returned():
    members = SourceMembers()
    members.put("u", [endpoint("u")], "", 0)
    assert members.put("u", [endpoint("u")], "", 1) == []
    (changed,) = members.put("u", [endpoint("u", model="m")], "", 2)
    assert (changed.found.entry.model, changed.since) == ("m", 0)


def test_of_two_members_at_one_address_the_newest_that_stays_is_chosen():
    members, other = SourceMembers(), SourceMembers()
    members.put("old", [endpoint("old")], "", 0)
    members.put("new", [endpoint("new")], "", 1)
    assert [each.discovered.uid for each in combine([members])] == ["new"]
    members.put("new", [], "gone", 2)
    assert [each.discovered.uid for each in combine([members])] == ["old"]
    other.put("x", [endpoint("x", source="t")], "", 3)
    assert [each.discovered.uid for each in combine([members, other])] == ["old"]
    members.put("old", [], "gone", 4)
    assert [each.discovered.uid for each in combine([members, other])] == ["x"]


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


def take(members: SourceMembers, model: Model, step, now: float):
    """Applies a step to both; returns what the members report as changed."""
    if step == "forget":
        for member in members.leaving():
            members.forget(member)
        model.forget()
        return []
    listed = step if isinstance(step, dict) else {step[0]: step[1]}
    endpoints_by_uid = {
        uid: [endpoint(uid, url, ready=ready) for url, ready in endpoints]
        for uid, endpoints in listed.items()
    }
    for uid in "abc" if isinstance(step, dict) else step[0]:
        model.put(uid, listed.get(uid, []))
    if isinstance(step, dict):
        return members.replace(endpoints_by_uid, "gone", now)
    return members.put(step[0], endpoints_by_uid[step[0]], "", now)


@given(steps=STEPS)
def test_members_behave_like_a_simple_model(steps):
    members, model = SourceMembers(), Model()
    for now, step in enumerate(steps):
        before = dict(model.states)
        changed = take(members, model, step, now)
        assert states(members) == model.states
        visible = {
            key: state for key, state in model.states.items() if state is not DiscoveryState.PENDING
        }
        moved = {key for key, state in visible.items() if state is not before.get(key)}
        assert {(each.uid, each.url) for each in changed} == moved
        assert {each.entry.url for each in combine([members])} == {url for _, url in visible}
