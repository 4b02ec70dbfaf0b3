import hashlib

import pytest
import torch

from omni_proxy.replica.models.text_model import TextModel, load_text_model
from omni_proxy.replica.models.tiny import FIRST_SYLLABLE


def digest(model: TextModel) -> str:
    sha256 = hashlib.sha256()
    for name, weight in model.model.named_parameters():
        sha256.update(name.encode() + weight.numpy().tobytes())
    return sha256.hexdigest()


@pytest.fixture(scope="module")
def tiny() -> TextModel:
    return load_text_model("tiny")


def prompt_of(tiny, content: str) -> list[int]:
    prompt = tiny.chat_template.render([{"role": "user", "content": content}])
    return tiny.tokenizer.encode(prompt, special=True)


def greedy(tiny, prompt: list[int], count: int) -> list[int]:
    kv, generated, inputs = tiny.model.new_kv(), [], prompt
    for _ in range(count):
        inputs = [int(tiny.model([(inputs, kv)])[0].argmax())]
        generated += inputs
    return generated


def test_a_seed_always_gives_the_same_weights(tiny):
    assert digest(load_text_model("tiny")) == digest(tiny)
    assert digest(load_text_model("tiny", seed=1)) != digest(tiny)


def test_the_model_is_small_and_its_sizes_agree(tiny):
    assert sum(weight.numel() for weight in tiny.model.parameters()) == 853_120
    assert tiny.tokenizer.vocab_size == tiny.model.config.vocab_size == 512
    assert tiny.context == tiny.model.config.max_position_embeddings


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("content", ["", "What is the capital of France?", "ban ror", "😀" * 4])
def test_greedy_text_varies_is_printable_and_does_not_end(seed, content):
    model = load_text_model("tiny", seed=seed)
    generated = greedy(model, prompt_of(model, content), 150)
    assert len(set(generated)) > 50
    assert not model.tokenizer.eos_ids.intersection(generated)
    text = model.tokenizer.decode(generated)
    assert text.replace("\n", "").isprintable()
    assert text.isascii()


def test_the_text_depends_on_the_prompt(tiny):
    assert greedy(tiny, prompt_of(tiny, "one"), 20) != greedy(tiny, prompt_of(tiny, "two"), 20)


def test_even_at_a_high_temperature_only_syllables_are_likely(tiny):
    kv, inputs = tiny.model.new_kv(), prompt_of(tiny, "Tell me more?")
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        probabilities = (tiny.model([(inputs, kv)])[0] / 2.0).softmax(-1)
        assert probabilities[:FIRST_SYLLABLE].sum() < 1e-4
        inputs = torch.multinomial(probabilities, 1, generator=rng).tolist()
