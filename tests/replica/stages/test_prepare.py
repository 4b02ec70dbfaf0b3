import pytest

from omni_proxy.replica.models.tiny import TinyTokenizer
from omni_proxy.replica.pipeline.messages import OmniRequest, StagePayload
from omni_proxy.replica.pipeline.stage import CallerFault
from omni_proxy.replica.stages.prepare import prompts_of


def prepared(inputs, **data):
    payload = StagePayload("r", OmniRequest(inputs), {"raw_inputs": inputs, **data})
    return prompts_of("tiny").prepared(payload, None, None)["token_ids"]


def text_of(inputs, **data):
    return TinyTokenizer().decode(prepared(inputs, **data))


def user(content, **keys):
    return {"messages": [{"role": "user", "content": content, **keys}]}


def controls(token_ids):
    return sum(token < 4 for token in token_ids)


def test_messages_are_written_through_the_template_with_its_control_tokens():
    token_ids = prepared(user("hi"))
    # The user's begin and end, and the begin of the answer.
    assert controls(token_ids) == 3
    assert TinyTokenizer().decode(token_ids) == "user\nhi\nassistant\n"


def test_a_prompt_is_encoded_as_it_is():
    assert text_of("hello there") == "hello there"
    assert text_of({"prompt": "hello there"}) == "hello there"


@pytest.mark.parametrize("inputs", [[5, 6, 7], (5, 6, 7), {"prompt": [5, 6, 7]}])
def test_token_ids_pass(inputs):
    assert prepared(inputs) == [5, 6, 7]


def test_transcripts_stand_where_the_audio_stood():
    inputs = user(
        [
            {"type": "text", "text": "before"},
            {"type": "audio"},
            {"type": "text", "text": "between"},
            {"type": "input_audio", "input_audio": {"data": ""}},
        ]
    )
    told = text_of(inputs, transcripts=["first", "second"])
    assert told == "user\nbefore\nfirst\nbetween\nsecond\nassistant\n"


def test_transcripts_go_on_from_message_to_message():
    inputs = {"messages": [*user([{"type": "audio"}])["messages"] * 2]}
    assert text_of(inputs, transcripts=["a", "b"]) == "user\na\nuser\nb\nassistant\n"


def test_a_message_without_content_is_an_empty_one():
    assert text_of(user(None)) == "user\n\nassistant\n"


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (user([{"type": "audio"}]), "--transcription whisper-tiny"),
        (user([{"type": "image_url", "image_url": {}}]), "part of type image_url cannot be used"),
        (user([{"type": "video_url"}]), "part of type video_url cannot be used"),
        (user("hi") | {"images": ["x"]}, "images cannot be used: no stage of this pipeline sees"),
        (user("hi") | {"videos": ["x"]}, "videos cannot be used"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "a message must have a role"),
        ({"messages": [{"content": "hi"}]}, "must have a role"),
        ({}, "neither text nor a list of token ids"),
        ([1, "a"], "neither text nor a list of token ids"),
        ([True], "neither text nor a list of token ids"),
    ],
)
def test_what_cannot_be_a_prompt_is_the_callers_fault(inputs, reason):
    with pytest.raises(CallerFault, match=reason):
        prepared(inputs)


def test_an_unknown_model_is_told_with_those_there_are():
    with pytest.raises(ValueError, match="no text model is called 'gpt': tiny, smollm2-135m"):
        prompts_of("gpt")
