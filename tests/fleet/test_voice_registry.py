from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.voice_registry import VoiceRegistry

A, B = "http://a:1", "http://b:1"


def registry_of(owner, *names):
    registry = VoiceRegistry()
    registry.voices_changed(owner)
    if names:
        assert registry.set_names(registry.generation, names)
    return registry


def test_without_an_owner_nothing_is_pinned():
    registry = VoiceRegistry()
    assert not registry.requires_owner(["bob"])
    assert registry.state == "unassigned"


def test_until_the_list_is_known_every_voice_is_pinned():
    registry = registry_of(A)
    assert registry.requires_owner(["anybody"])
    assert not registry.requires_owner([])
    assert registry.state == "pending"


def test_with_a_list_only_uploaded_voices_are_pinned():
    registry = registry_of(A, "Bob")
    assert (registry.requires_owner(["bob"]), registry.requires_owner(["ann"])) == (True, False)
    assert registry.requires_owner(["ann", "bob"])
    assert registry.state == "ready"


def test_a_list_requested_before_a_change_is_dropped():
    registry = registry_of(A, "bob")
    generation = registry.generation
    registry.voices_changed(A)
    assert not registry.set_names(generation, ["bob"])
    assert registry.names is None


def test_a_failed_refresh_keeps_the_known_names():
    registry = registry_of(A, "bob")
    registry.refresh_failed(registry.generation, "status=500")
    assert registry.names == {"bob"}
    assert (registry.state, registry.refresh_error) == ("degraded", "status=500")


def test_the_configured_owner_overrides_a_restored_one():
    registry = VoiceRegistry()
    registry.configure(A)
    registry.restore(B, ["bob"])
    assert (registry.owner, registry.names) == (A, None)
    registry.restore(A, ["bob"])
    assert registry.names == {"bob"}


def test_an_owner_that_leaves_the_fleet_is_dropped():
    registry = registry_of(A, "bob")
    assert registry.update_presence({A, B}) == ""
    assert registry.update_presence({B}) == A
    assert (registry.owner, registry.names) == ("", None)


def test_a_restored_owner_is_kept_until_it_joins():
    registry = VoiceRegistry()
    registry.restore(A, ["bob"])
    assert registry.update_presence({B}) == ""
    assert registry.owner == A


def test_a_configured_owner_is_kept_while_its_worker_is_missing():
    registry = VoiceRegistry()
    registry.configure(A)
    registry.update_presence({A})
    assert registry.update_presence(set()) == ""
    assert registry.owner == A


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from([A, B])),
        st.tuples(st.just("request"), st.just("")),
        st.tuples(st.just("receive"), st.sampled_from(["bob", "ann"])),
        st.tuples(st.just("fleet"), st.sampled_from([A, B, A + B])),
    )
)


@given(CHANGES)
def test_a_list_requested_before_a_change_is_never_used(changes):
    registry, requested, notified = VoiceRegistry(), None, []
    registry.watch(lambda: notified.append(registry.generation))
    fresh = False  # nothing has changed since the request
    for what, value in changes:
        before = registry.generation
        if what == "change":
            registry.voices_changed(value)
        elif what == "request":
            requested, fresh = registry.generation, True
        elif what == "fleet":
            registry.update_presence({url for url in (A, B) if url in value})
        elif requested is not None:
            assert registry.set_names(requested, [value]) == fresh
            assert not fresh or registry.names == {value}
        if registry.generation != before:
            fresh = False
            assert notified[-1] == registry.generation
            assert registry.names is None
