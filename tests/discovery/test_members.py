from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.overlay import Discovered, FoundWorker
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.discovery.members import Sighting, SourceMembers, Standing, combine

URLS = [f"http://10.0.0.{n}:1" for n in range(3)]


def sighting(uid: str, url: str = URLS[0], *, ready: bool = True, source: str = "s", **settings):
    entry = WorkerEntry(url=url, **settings)
    return Sighting(FoundWorker(entry, Discovered(source, uid)), ready)


def standings(members: SourceMembers) -> dict[tuple[str, str], Standing]:
    return {(member.uid, member.url): member.standing for member in members}


def test_one_that_never_was_ready_is_not_seen_outside():
    members = SourceMembers()
    assert members.put("u", [sighting("u", ready=False)], "not ready", 0) == []
    assert combine([members]) == ()
    assert members.put("u", [], "gone", 1) == []
    assert list(members) == []


def test_one_that_was_open_leaves_and_may_come_back():
    members = SourceMembers()
    (member,) = members.put("u", [sighting("u")], "", 0)
    assert member.standing is Standing.OPEN
    (held,) = members.put("u", [sighting("u", ready=False)], "not ready", 1)
    assert (held is member, held.standing, held.reason) == (True, Standing.NOT_READY, "not ready")
    members.put("u", [], "gone", 2)
    assert (member.standing, member.since, member.reason) == (Standing.LEAVING, 2, "gone")
    assert len(combine([members])) == 1
    members.put("u", [sighting("u")], "", 3)
    assert (member.standing, member.reason) == (Standing.OPEN, "")
    members.put("u", [], "gone", 4)
    members.forget(member)
    assert combine([members]) == ()


def test_only_what_changed_is_reported():
    members = SourceMembers()
    members.put("u", [sighting("u")], "", 0)
    assert members.put("u", [sighting("u")], "", 1) == []
    (changed,) = members.put("u", [sighting("u", model="m")], "", 2)
    assert (changed.found.entry.model, changed.since) == ("m", 0)


def test_of_two_with_one_address_the_one_that_stays_and_then_the_newest_is_chosen():
    members, other = SourceMembers(), SourceMembers()
    members.put("old", [sighting("old")], "", 0)
    members.put("new", [sighting("new")], "", 1)
    assert [each.discovered.uid for each in combine([members])] == ["new"]
    members.put("new", [], "gone", 2)
    assert [each.discovered.uid for each in combine([members])] == ["old"]
    other.put("x", [sighting("x", source="t")], "", 3)
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
    """Standings by uid and URL, as one would say them."""

    def __init__(self):
        self.standings = {}

    def put(self, uid, seen):
        for url, ready in seen:
            before = self.standings.get((uid, url))
            waits = Standing.PENDING if before in (None, Standing.PENDING) else Standing.NOT_READY
            self.standings[uid, url] = Standing.OPEN if ready else waits
        for key in [key for key in self.standings if key[0] == uid and key[1] not in dict(seen)]:
            if self.standings[key] is Standing.PENDING:
                del self.standings[key]
            else:
                self.standings[key] = Standing.LEAVING

    def forget(self):
        self.standings = {
            key: standing
            for key, standing in self.standings.items()
            if standing is not Standing.LEAVING
        }


def take(members: SourceMembers, model: Model, step, now: float):
    """The same step in both; what the members say has changed."""
    if step == "forget":
        for member in members.leaving():
            members.forget(member)
        model.forget()
        return []
    listed = step if isinstance(step, dict) else {step[0]: step[1]}
    seen = {
        uid: [sighting(uid, url, ready=ready) for url, ready in each]
        for uid, each in listed.items()
    }
    for uid in "abc" if isinstance(step, dict) else step[0]:
        model.put(uid, listed.get(uid, []))
    if isinstance(step, dict):
        return members.replace(seen, "gone", now)
    return members.put(step[0], seen[step[0]], "", now)


@given(steps=STEPS)
def test_members_are_as_a_naive_model_has_them(steps):
    members, model = SourceMembers(), Model()
    for now, step in enumerate(steps):
        before = dict(model.standings)
        changed = take(members, model, step, now)
        assert standings(members) == model.standings
        visible = {
            key: standing
            for key, standing in model.standings.items()
            if standing is not Standing.PENDING
        }
        moved = {key for key, standing in visible.items() if standing is not before.get(key)}
        assert {(each.uid, each.url) for each in changed} == moved
        assert {each.entry.url for each in combine([members])} == {url for _, url in visible}
