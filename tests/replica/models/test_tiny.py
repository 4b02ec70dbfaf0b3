import hashlib

import pytest
import torch

from omni_proxy.replica.models.text_model import TextModel, load_text_model
from omni_proxy.replica.models.tiny import FIRST_SYLLABLE


def digest(model: TextModel) -> str:
    total = hashlib.sha256()
    for name, weight in model.model.named_parameters():
        total.update(name.encode() + weight.numpy().tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def tiny() -> TextModel:
    return load_text_model("tiny")


def asked(tiny, content: str) -> list[int]:
    prompt = tiny.chat_template.render([{"role": "user", "content": content}])
    return tiny.tokenizer.encode(prompt, special=True)


def greedy(tiny, prompt: list[int], count: int) -> list[int]:
    kv, answer, read = tiny.model.new_kv(), [], prompt
    for _ in range(count):
        read = [int(tiny.model([(read, kv)])[0].argmax())]
        answer += read
    return answer


def test_every_build_of_a_seed_has_the_same_bytes(tiny):
    assert digest(load_text_model("tiny")) == digest(tiny)
    assert digest(load_text_model("tiny", seed=1)) != digest(tiny)


def test_it_is_a_small_model_whose_parts_belong_together(tiny):
    assert sum(weight.numel() for weight in tiny.model.parameters()) == 853_120
    assert tiny.tokenizer.vocab_size == tiny.model.config.vocab_size == 512
    assert tiny.context == tiny.model.config.max_position_embeddings


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("content", ["", "What is the capital of France?", "ban ror", "😀" * 4])
def test_greedy_text_varies_is_printable_and_continues(seed, content):
    model = load_text_model("tiny", seed=seed)
    answer = greedy(model, asked(model, content), 150)
    assert len(set(answer)) > 50
    assert not model.tokenizer.eos_ids.intersection(answer)
    text = model.tokenizer.decode(answer)
    assert text.replace("\n", "").isprintable()
    assert text.isascii()


def test_the_text_depends_on_the_question(tiny):
    assert greedy(tiny, asked(tiny, "one"), 20) != greedy(tiny, asked(tiny, "two"), 20)


def test_even_a_hot_draw_practically_never_ends_or_writes_a_byte(tiny):
    kv, read = tiny.model.new_kv(), asked(tiny, "Tell me more?")
    chance = torch.Generator().manual_seed(0)
    for _ in range(100):
        shares = (tiny.model([(read, kv)])[0] / 2.0).softmax(-1)
        assert shares[:FIRST_SYLLABLE].sum() < 1e-4
        read = torch.multinomial(shares, 1, generator=chance).tolist()
