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
    Journal, in_progress=st.none() | BEGUN, uncertain=st.dictionaries(URLS, st.text(max_size=9))
)


@given(JOURNALS)
def test_a_journal_survives_encoding(journal):
    assert decode(encode(journal)) == journal


def test_a_lone_surrogate_becomes_a_question_mark():
    journal = Journal(
        uncertain={"http://a": "\ud800x"}, pauses={"http://a": PauseRecord(mode="\udfff")}
    )
    assert decode(encode(journal)) == Journal(
        uncertain={"http://a": "?x"}, pauses={"http://a": PauseRecord(mode="?")}
    )


@given(JOURNALS)
def test_exactly_the_recorded_workers_are_uncertain_at_the_start(journal):
    targets = journal.in_progress.targets if journal.in_progress else ()
    uncertain = journal.uncertain_at_start()
    assert uncertain.keys() == {*targets, *journal.uncertain}
    for url, reason in journal.uncertain.items():
        assert uncertain[url] == reason
    for url in set(targets) - journal.uncertain.keys():
        assert uncertain[url].startswith(
            "the proxy ended while update_weights_from_disk was under way"
        )


def test_a_journal_with_nothing_in_progress_is_falsy():
    assert not Journal()
    assert Journal(uncertain={"http://a": ""})


@given(JOURNALS, st.data())
def test_a_truncated_journal_is_refused(journal, data):
    raw = encode(journal).rstrip()
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(UnreadableJournal):
        decode(raw[:cut])


@pytest.mark.parametrize(
    "raw", [b"[]", b'{"format": 2}', b"\xff", b'{"begun": {"path": "/x"}}', b'{"uncertain": []}']
)
def test_invalid_journals_are_refused(raw):
    with pytest.raises(UnreadableJournal):
        decode(raw)


@pytest.mark.parametrize("step", ["joining", "grouped", "arming", "armed", "committing"])
def test_participants_of_a_sync_are_uncertain_from_arming_on(step):
    sync = JournalEntry(
        operation="g",
        path="/prepare_weights_update",
        targets=("http://a",),
        begun_at="now",
        step=step,
    )
    journal = decode(encode(Journal(sync=sync)))
    assert journal
    assert set(journal.uncertain_at_start()) == (
        set() if step in ("joining", "grouped") else {"http://a"}
    )
