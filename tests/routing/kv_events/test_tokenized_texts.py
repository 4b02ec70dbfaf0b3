"""Known texts are bounded in memory; calls to /tokenize are limited unless their results are used."""

import pytest

from omni_proxy.routing.kv_events import tokenized_texts
from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.tokenized_texts import (
    BUDGET_SECS,
    INITIAL_BUDGET,
    MAX_BYTES,
    MAX_QUEUED,
    MIN_BYTES,
    SILENT_SECS,
    TokenizedTexts,
    TokenizeRequest,
)
from omni_proxy.routing.tree_key import tree_key

URL = "http://w"


def request(text, url=URL):
    return TokenizeRequest(url, tree_key(text), len(text), b"{}")


def known_texts(*texts):
    known = TokenizedTexts()
    for text in texts:
        known.add(request(text), range(len(text) // 4))
    return known


def find(known, text):
    return known.find(tree_key(text), len(text))


def test_a_text_with_a_known_beginning_has_the_tokens_of_that_beginning():
    text = b"".join(b"%04d" % number for number in range(2048))
    known = known_texts(text)
    whole = find(known, text)
    assert (whole.shared, whole.tokens) == (8192, 2048)
    blocks = whole.known.blocks(16, whole.tokens)
    assert [blocks.key(number) for number in (1, 128)] == block_keys(range(2048), 16)[::127]
    longer = find(known, text + b"x" * 8192)
    assert (longer.shared, longer.tokens) == (8192, 2048)
    other = find(known, text[:4096] + b"x" * 4096)
    assert (other.shared, other.tokens) == (4096, 1024)
    assert other.known.blocks(16, other.tokens).count == 64
    assert find(known, b"x" * 8192) is None


def test_the_oldest_texts_are_dropped_first(monkeypatch):
    monkeypatch.setattr(tokenized_texts, "MAX_TEXTS", 3)
    texts = [bytes([mark]) * 5000 for mark in b"abcde"]
    known = known_texts(*texts)
    assert len(known) == 3
    assert [find(known, text) is not None for text in texts] == [False, False, True, True, True]
    monkeypatch.setattr(tokenized_texts, "MAX_TOKENS", 2500)
    known.add(request(b"f" * 5000), range(1250))
    assert [find(known, text) is not None for text in texts] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("length", "worth"),
    [(MIN_BYTES - 1, False), (MIN_BYTES, True), (MAX_BYTES, True), (MAX_BYTES + 1, False)],
)
def test_short_and_cut_texts_are_not_worth_a_question(length, worth):
    assert TokenizedTexts().should_tokenize(URL, length, None, 0.0) is worth


def test_a_mostly_known_text_is_not_worth_a_question():
    text = b"t" * 8192
    known = known_texts(text)
    for length, worth in ((10_000, False), (16_384, True)):
        longer = text + b"x" * (length - len(text))
        assert known.should_tokenize(URL, length, find(known, longer), 0.0) is worth


def test_questions_without_use_stop_and_resume_slowly():
    known = TokenizedTexts()
    known.maintain(0.0)

    def ask_all():
        count = 0
        while known.should_tokenize(URL, MIN_BYTES, None, 0.0):
            known.enqueue(request(b"%d" % count * MIN_BYTES))
            count += 1
        return count

    assert ask_all() == INITIAL_BUDGET
    known.record_use()
    assert ask_all() == 2
    known.maintain(3 * BUDGET_SECS)
    assert ask_all() == 3
    waiting = 0
    while known.next_request() is not None:
        waiting += 1
    assert waiting == MAX_QUEUED


def test_an_engine_that_does_not_answer_is_not_asked_for_a_while():
    known = TokenizedTexts()
    known.record_failure(request(b"t" * MIN_BYTES), 10.0)
    assert not known.should_tokenize(URL, MIN_BYTES, None, 10.0 + SILENT_SECS - 1)
    assert known.should_tokenize(URL, MIN_BYTES, None, 10.0 + SILENT_SECS)
    assert known.should_tokenize("http://other", MIN_BYTES, None, 11.0)
    assert known.to_dict() == {"texts": 0, "calls": 0, "failed": 1, "used": 0}
