import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_proxy.replica.models.tiny import TinyTokenizer
from omni_proxy.replica.models.tokenizer import (
    MAX_ENCODE_CHARS,
    BytePairTokenizer,
    Utf8Stream,
    byte_letters,
)

LETTERS = {byte: letter for letter, byte in byte_letters().items()}
CONTROLS = ["<|end|>", "<|start|>"]
MERGED = ["Ġt", "he", "Ġthe", "in", "ĠĠ", "Ċ", "ðŁ"]


def vocabulary(without: bytes = b"") -> list[str]:
    single = [LETTERS[byte] for byte in range(256) if byte not in without]
    return CONTROLS + single + [token for token in MERGED if token not in single]


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer(vocabulary(), [0, 1], [0])


def bytes_of_tokens(tokenizer, text: str, **options) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text, **options)]


def test_each_byte_has_its_letter():
    assert sorted(byte_letters().values()) == list(range(256))
    assert (LETTERS[ord("a")], LETTERS[ord(" ")], LETTERS[ord("\n")]) == ("a", "Ġ", "Ċ")


@given(st.text())
@example("naïve 👩‍👩‍👧 \u200b\t\r\n  1234 don't　'LL")
@example("<|end|>")
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1}.intersection(ids)


def test_text_is_split_before_pairs_are_merged(tokenizer):
    assert bytes_of_tokens(tokenizer, " the in") == [b" the", b" ", b"in"]
    assert bytes_of_tokens(tokenizer, " 12") == [b" ", b"1", b"2"]
    assert bytes_of_tokens(tokenizer, "   the") == [b"  ", b" the"]


def test_control_tokens_are_parsed_only_on_request_and_decode_to_nothing(tokenizer):
    text = "<|start|>in<|end|>"
    ids = tokenizer.encode(text, special=True)
    assert [ids[0], ids[-1], len(ids)] == [1, 0, 3]
    assert tokenizer.decode(ids) == "in"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(0) == b""


def test_the_longest_control_name_that_matches_is_read():
    names = ["<a", "<ab", *vocabulary()[2:]]
    assert BytePairTokenizer(names, [0, 1], []).encode("<ab", special=True) == [1]


@given(st.text(st.sampled_from("a\x04é\U000f0000\U00040000\ud800 "), max_size=20))
def test_a_character_without_tokens_becomes_one_replacement_character(text):
    tokenizer = BytePairTokenizer(vocabulary(without=b"\x04\xf1"), [0, 1], [])
    decoded = tokenizer.decode(tokenizer.encode(text))
    expected = "".join(
        "\ufffd" if character in "\x04\U00040000\ud800" else character for character in text
    )
    assert decoded == expected


@pytest.mark.parametrize("letter", [" ", "\n", "^", "7", "a", "😀"])
def test_a_very_long_run_of_one_character_round_trips(tokenizer, letter):
    text = letter * (MAX_ENCODE_CHARS * 16)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_invalid_vocabulary_is_refused():
    for tokens, reason in (
        ([*vocabulary(), "a b"], "token 264 of the vocabulary, 'a b', is not written"),
        ([*vocabulary(), "he"], "token 264 of the vocabulary, 'he', is a duplicate"),
        (vocabulary(without=b"a"), "no token for the byte 0x61"),
    ):
        with pytest.raises(ValueError, match=reason):
            BytePairTokenizer(tokens, [0, 1], [])


@pytest.fixture(scope="module")
def tiny() -> TinyTokenizer:
    return TinyTokenizer()


@given(st.text() | st.lists(st.sampled_from(["ban", " ror", ". ", "us", "b", " "])).map("".join))
def test_any_text_round_trips_through_the_tiny_tokenizer(tiny, text):
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert all(0 <= token < tiny.vocab_size for token in ids)


def test_the_tiny_tokenizer_takes_the_longest_syllable(tiny):
    assert bytes_of_tokens(tiny, " banana. x") == [b" ban", b"a", b"na", b". ", b"x"]
    ids = tiny.encode("<|im_start|>ban<|im_end|>", special=True)
    assert tiny.decode(ids) == "ban"
    assert ids[-1] in tiny.eos_ids


def test_a_lone_surrogate_becomes_a_question_mark_in_the_tiny_tokenizer(tiny):
    assert tiny.decode(tiny.encode("ban\ud800")) == "ban?"


@given(st.lists(st.binary(max_size=5) | st.text(max_size=3).map(str.encode)), st.integers(1, 4))
def test_the_text_does_not_depend_on_how_the_bytes_are_chunked(chunks, step):
    data = b"".join(chunks)
    expected = data.decode("utf-8", errors="replace")
    for parts in (chunks, [data[start : start + step] for start in range(0, len(data), step)]):
        stream = Utf8Stream()
        assert "".join(map(stream.feed, parts)) + stream.flush() == expected


def test_an_incomplete_character_is_held_back_and_flushed_once():
    stream = Utf8Stream()
    assert [stream.feed(byte) for byte in (b"a\xf0", b"\x9f", b"\x98", b"\x80!")] == [
        "a",
        "",
        "",
        "😀!",
    ]
    assert stream.feed(b"\xe2\x82") == ""
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    assert stream.feed(b"b") == "b"
