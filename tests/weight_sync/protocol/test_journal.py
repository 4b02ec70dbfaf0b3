import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.weight_sync.protocol.journal import (
    Journal,
    JournalEntry,
    PauseRecord,
    UnreadableJournal,
    decode,
    encode,
)

URLS = st.sampled_from(("http://a", "http://b", "unix:/c", "http://d"))
BEGUN = st.builds(
    JournalEntry,
    operation=st.text(max_size=5),
    path=st.just("/update_weights_from_disk"),
    targets=st.lists(URLS, unique=True).map(tuple),
    begun_at=st.just("2026-11-21T05:44:28+00:00"),
    step=st.just("calling"),
)
JOURNALS = st.builds(
    Journal, begun=st.none() | BEGUN, uncertain=st.dictionaries(URLS, st.text(max_size=9))
)


@given(JOURNALS)
def test_what_is_written_is_read(journal):
    assert decode(encode(journal)) == journal


def test_half_a_character_is_written_as_a_question_mark():
    told = Journal(
        uncertain={"http://a": "\ud800x"}, pauses={"http://a": PauseRecord(mode="\udfff")}
    )
    assert decode(encode(told)) == Journal(
        uncertain={"http://a": "?x"}, pauses={"http://a": PauseRecord(mode="?")}
    )


@given(JOURNALS)
def test_at_the_start_exactly_the_named_are_uncertain(journal):
    targets = journal.begun.targets if journal.begun else ()
    found = journal.at_start()
    assert found.keys() == {*targets, *journal.uncertain}
    for url, reason in journal.uncertain.items():
        assert found[url] == reason
    for url in set(targets) - journal.uncertain.keys():
        assert found[url].startswith("the proxy ended while update_weights_from_disk was under way")


def test_nothing_under_way_and_nobody_uncertain_is_no_record():
    assert not Journal()
    assert Journal(uncertain={"http://a": ""})


@given(JOURNALS, st.data())
def test_a_record_that_was_cut_is_refused(journal, data):
    raw = encode(journal).rstrip()
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(UnreadableJournal):
        decode(raw[:cut])


@pytest.mark.parametrize(
    "raw", [b"[]", b'{"format": 2}', b"\xff", b'{"begun": {"path": "/x"}}', b'{"uncertain": []}']
)
def test_what_is_no_record_is_refused(raw):
    with pytest.raises(UnreadableJournal):
        decode(raw)


@pytest.mark.parametrize("step", ["joining", "grouped", "arming", "armed", "committing"])
def test_members_of_a_sync_are_doubted_from_the_moment_on_in_which_they_may_receive(step):
    sync = JournalEntry(
        operation="g",
        path="/prepare_weights_update",
        targets=("http://a",),
        begun_at="now",
        step=step,
    )
    journal = decode(encode(Journal(sync=sync)))
    assert journal
    assert set(journal.at_start()) == (set() if step in ("joining", "grouped") else {"http://a"})
