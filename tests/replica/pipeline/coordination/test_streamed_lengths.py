from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.coordination.delivery import StreamedLengths, size_bytes

CUTS = st.lists(st.integers(0, 12), max_size=6)


@given(st.text(max_size=12), CUTS, st.booleans())
def test_pieces_and_rest_are_the_whole(text, cuts, complete):
    ends = sorted(min(cut, len(text)) for cut in cuts) + ([len(text)] if complete else [])
    whole = {"text": text, "token_ids": list(range(len(text))), "audio_data": text.encode("utf-32")}
    sent, got, start = StreamedLengths(), [], 0
    for end in ends:
        audio = text[start:end].encode("utf-32-le")
        piece = {"text": text[start:end], "token_ids": list(range(start, end)), "audio_data": audio}
        sent.add(piece)
        got.append(piece)
        start = end
    rest = sent.remaining(whole | {"audio_data": text.encode("utf-32-le"), "finish_reason": "stop"})
    got.append(rest)
    assert "".join(piece["text"] for piece in got) == text
    assert [token for piece in got for token in piece["token_ids"]] == list(range(len(text)))
    assert b"".join(piece["audio_data"] for piece in got) == text.encode("utf-32-le")
    assert rest["finish_reason"] == "stop"


def test_a_whole_without_what_was_streamed_stays_as_it_is():
    sent = StreamedLengths()
    sent.add({"text": "abc"})
    assert sent.remaining({"text": None, "usage": {}}) == {"text": None, "usage": {}}


def test_audio_and_text_count_by_their_length():
    empty = size_bytes({})
    assert size_bytes({"audio_data": b"x" * 1000}) == empty + 1000
    assert size_bytes({"text": "x" * 10, "token_ids": [1, 2]}) == empty + 26
