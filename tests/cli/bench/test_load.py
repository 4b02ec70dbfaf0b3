from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.cli.bench.load import PromptTexts
from omni_proxy.simulate.workload import Request


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(1, 600))
def test_a_prompt_has_a_word_for_each_token(seed, tokens):
    texts = PromptTexts(seed)
    assert len(texts.prompt(Request(0.0, tokens, 1)).split()) == tokens
    blocks = tuple(range(-(-tokens // 64)))
    assert len(texts.prompt(Request(0.0, tokens, 1, blocks, 64)).split()) == tokens


def test_prompts_share_the_text_of_equal_leading_blocks_only():
    texts = PromptTexts(0)
    one = texts.prompt(Request(0.0, 150, 1, (1, 2, 3), 64)).split()
    other = texts.prompt(Request(0.0, 192, 1, (1, 2, 4), 64)).split()
    longer = texts.prompt(Request(0.0, 192, 1, (1, 2, 3), 64)).split()
    assert one[:128] == other[:128]
    assert one[128:150] != other[128:150]
    assert longer[:150] == one


def test_prompts_without_blocks_share_nothing_and_depend_on_the_seed():
    def three(seed):
        texts = PromptTexts(seed)
        return [texts.prompt(Request(0.0, 64, 1)) for _ in range(3)]

    assert len(set(three(1))) == 3
    assert three(1) == three(1)
    assert set(three(1)) & set(three(2)) == set()
