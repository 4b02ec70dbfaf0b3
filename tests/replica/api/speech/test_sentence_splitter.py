import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.api.speech.sentence_splitter import SentenceSplitter


def split(*chunks, clauses=False):
    splitter = SentenceSplitter(clauses=clauses)
    return [sentence for chunk in chunks for sentence in splitter.feed(chunk)] + splitter.flush()


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
def test_text_is_split_after_punctuation_that_ends_a_sentence(text, segments):
    assert split(text) == segments


def test_clauses_are_also_split_after_commas_but_not_within_numbers():
    assert split("a, b; c: 1,000 d\uff0c e", clauses=True) == ["a,", "b;", "c: 1,000 d\uff0c", "e"]


def test_a_sentence_is_emitted_at_its_punctuation_mark():
    splitter = SentenceSplitter()
    assert splitter.feed("One") == []
    assert splitter.buffered_chars == 3
    assert splitter.feed(".") == ["One."]
    assert splitter.buffered_chars == 0


def test_a_period_after_a_digit_waits_for_the_next_character():
    splitter = SentenceSplitter()
    assert splitter.feed("It is 3.") == []
    assert splitter.feed("5. ") == ["It is 3.5."]
    assert splitter.feed("And 7.") == []
    assert splitter.flush() == ["And 7."]


@given(st.text(alphabet="ab1., !?\u3002", max_size=60), st.integers(1, 5))
def test_no_text_is_lost_or_repeated(text, size):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    letters = "".join(filter(str.isalnum, "".join(split(*chunks))))
    assert letters == "".join(filter(str.isalnum, text))


@given(st.lists(st.sampled_from(["a", "b c", "1", "2.5", ".", "!", " "]), max_size=30))
def test_sentences_do_not_depend_on_how_the_text_is_chunked(chunks):
    def words(sentences):
        texts = ("".join(filter(str.isalnum, sentence)) for sentence in sentences)
        return list(texts)

    assert words(split(*chunks)) == words(split("".join(chunks)))
