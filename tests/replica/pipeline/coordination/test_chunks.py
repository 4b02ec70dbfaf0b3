from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.coordination.delivery import ChunkAssembler, ChunkSplitter


def assembled(splitter):
    assembly = ChunkAssembler("r")
    for chunk in splitter.pending:
        assembly.add(chunk)
    return assembly.result()


@given(st.lists(st.text(max_size=3), max_size=5), st.text(max_size=3), st.booleans())
def test_however_much_was_streamed_each_text_goes_out_once(pieces, tail, early):
    whole = {
        "text": "".join(pieces) + tail,
        "finish_reason": "length",
        "usage": {"total_tokens": 3},
    }
    splitter = ChunkSplitter("r")
    for piece in pieces:
        splitter.add_part("d", {"text": piece}, whole=False)
    if early:  # the stage has ended while another one still works
        splitter.add_part("d", whole, whole=True)
    splitter.end({"d": whole, "s": {"audio_data": b"1234", "sample_rate": 8000}})
    *others, last = splitter.pending
    assert last.terminal
    assert not any(chunk.terminal or chunk.finish_reason for chunk in others)
    result = assembled(splitter)
    assert result.text == whole["text"]
    assert (result.finish_reason, result.usage) == ("length", {"total_tokens": 3})
    assert (result.audio, result.sample_rate) == (b"1234", 8000)


def test_tokens_and_logprobs_go_out_once_too():
    splitter = ChunkSplitter("r")
    splitter.add_part(
        "d", {"token_ids": [1], "output_token_logprobs": [[-1, 1, None]]}, whole=False
    )
    whole = {"token_ids": [1, 2], "output_token_logprobs": [[-1, 1, None], [-2, 2, None]]}
    splitter.end({"d": {"text": "", **whole}})
    result = assembled(splitter)
    assert result.token_ids == [1, 2]
    assert result.logprobs == [[-1, 1, None], [-2, 2, None]]


def test_audio_alone_is_an_answer():
    splitter = ChunkSplitter("r")
    splitter.add_part("s", {"audio_data": b"1234", "sample_rate": 8000}, whole=False)
    splitter.end({"s": {"audio_data": b"12345678", "sample_rate": 8000}})
    first, last = splitter.pending
    assert (first.audio, first.modality, first.terminal) == (b"1234", "audio", False)
    assert (last.audio, last.modality, last.finish_reason) == (b"5678", "audio", "stop")


def test_what_is_not_known_here_is_passed_on():
    splitter = ChunkSplitter("r")
    splitter.end({"t": {"text": "a", "language": "en"}, "e": {"embedding": [0.5]}})
    assert assembled(splitter).extra == {"language": "en", "embedding": [0.5]}
