import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.api.speech.sentence_splitter import SentenceSplitter


def cut(*pieces, clauses=False):
    cutter = SentenceSplitter(clauses=clauses)
    return [segment for piece in pieces for segment in cutter.feed(piece)] + cutter.flush()


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("Hello. World", ["Hello.", "World"]),
        ("Really?! Yes... no", ["Really?!", "Yes...", "no"]),
        ('He said "go." Then', ['He said "go."', "Then"]),
        ("Pi is 3.14. Yes", ["Pi is 3.14.", "Yes"]),
        ("Version 2. Out", ["Version 2.", "Out"]),
        ("\u4f60\u597d\u3002\u518d\u89c1\uff01", ["\u4f60\u597d\u3002", "\u518d\u89c1\uff01"]),
        ("a, b; c", ["a, b; c"]),
        (" ... !", []),
        ("", []),
    ],
)
def test_text_is_cut_behind_the_marks_that_end_a_sentence(text, segments):
    assert cut(text) == segments


def test_clauses_are_cut_behind_commas_too_but_not_within_numbers():
    assert cut("a, b; c: 1,000 d\uff0c e", clauses=True) == ["a,", "b;", "c: 1,000 d\uff0c", "e"]


def test_a_sentence_is_emitted_at_its_punctuation_mark():
    cutter = SentenceSplitter()
    assert cutter.feed("One") == []
    assert cutter.buffered_chars == 3
    assert cutter.feed(".") == ["One."]
    assert cutter.buffered_chars == 0


def test_a_mark_behind_a_digit_waits_for_what_follows_it():
    cutter = SentenceSplitter()
    assert cutter.feed("It is 3.") == []
    assert cutter.feed("5. ") == ["It is 3.5."]
    assert cutter.feed("And 7.") == []
    assert cutter.flush() == ["And 7."]


@given(st.text(alphabet="ab1., !?\u3002", max_size=60), st.integers(1, 5))
def test_no_text_is_lost_or_repeated(text, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    heard = "".join(filter(str.isalnum, "".join(cut(*pieces))))
    assert heard == "".join(filter(str.isalnum, text))


@given(st.lists(st.sampled_from(["a", "b c", "1", "2.5", ".", "!", " "]), max_size=30))
def test_however_the_text_is_divided_the_same_words_stand_together(pieces):
    def words(segments):
        letters = ("".join(filter(str.isalnum, segment)) for segment in segments)
        return list(letters)

    assert words(cut(*pieces)) == words(cut("".join(pieces)))
