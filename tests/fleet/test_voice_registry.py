from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.voice_registry import VoiceRegistry

A, B = "http://a:1", "http://b:1"


def kept_at(owner, *names):
    registry = VoiceRegistry()
    registry.voices_changed(owner)
    if names:
        assert registry.set_names(registry.generation, names)
    return registry


def test_without_an_owner_nothing_is_pinned():
    registry = VoiceRegistry()
    assert not registry.requires_owner(["bob"])
    assert registry.state == "unassigned"


def test_until_the_list_is_read_every_named_voice_is_pinned():
    registry = kept_at(A)
    assert registry.requires_owner(["anybody"])
    assert not registry.requires_owner([])
    assert registry.state == "pending"


def test_afterwards_only_uploaded_voices_are():
    registry = kept_at(A, "Bob")
    assert (registry.requires_owner(["bob"]), registry.requires_owner(["ann"])) == (True, False)
    assert registry.requires_owner(["ann", "bob"])
    assert registry.state == "ready"


def test_a_list_requested_before_a_change_is_dropped():
    registry = kept_at(A, "bob")
    asked = registry.generation
    registry.voices_changed(A)
    assert not registry.set_names(asked, ["bob"])
    assert registry.names is None


def test_a_failed_reading_keeps_what_was_known():
    registry = kept_at(A, "bob")
    registry.refresh_failed(registry.generation, "status=500")
    assert registry.names == {"bob"}
    assert (registry.state, registry.refresh_error) == ("degraded", "status=500")


def test_the_configured_owner_wins_over_what_was_kept():
    registry = VoiceRegistry()
    registry.configure(A)
    registry.restore(B, ["bob"])
    assert (registry.owner, registry.names) == (A, None)
    registry.restore(A, ["bob"])
    assert registry.names == {"bob"}


def test_an_owner_that_leaves_the_fleet_is_none_any_more():
    registry = kept_at(A, "bob")
    assert registry.update_presence({A, B}) == ""
    assert registry.update_presence({B}) == A
    assert (registry.owner, registry.names) == ("", None)


def test_a_restored_owner_is_waited_for():
    registry = VoiceRegistry()
    registry.restore(A, ["bob"])
    assert registry.update_presence({B}) == ""
    assert registry.owner == A


def test_a_configured_owner_stays_while_its_worker_is_away():
    registry = VoiceRegistry()
    registry.configure(A)
    registry.update_presence({A})
    assert registry.update_presence(set()) == ""
    assert registry.owner == A


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from([A, B])),
        st.tuples(st.just("ask"), st.just("")),
        st.tuples(st.just("hear"), st.sampled_from(["bob", "ann"])),
        st.tuples(st.just("fleet"), st.sampled_from([A, B, A + B])),
    )
)


@given(CHANGES)
def test_no_list_outlives_a_change_after_its_request(changes):
    registry, asked, reported = VoiceRegistry(), None, []
    registry.watch(lambda: reported.append(registry.generation))
    fresh = False  # nothing has changed since `asked`
    for what, value in changes:
        before = registry.generation
        if what == "change":
            registry.voices_changed(value)
        elif what == "ask":
            asked, fresh = registry.generation, True
        elif what == "fleet":
            registry.update_presence({url for url in (A, B) if url in value})
        elif asked is not None:
            assert registry.set_names(asked, [value]) == fresh
            assert not fresh or registry.names == {value}
        if registry.generation != before:
            fresh = False
            assert reported[-1] == registry.generation
            assert registry.names is None
