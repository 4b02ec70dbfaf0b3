import random
import struct

import numpy as np
import pytest
import torch

from omni_proxy.replica.models.gguf import GGUFError
from omni_proxy.replica.models.text_model import TextModel, load_text_model, stored_name
from omni_proxy.replica.models.tokenizer import byte_letters
from tests.replica.models.gguf_files import F32, Q8_0, floats, gguf

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = [*CONTROLS, *byte_letters(), "he", "Ġthe"]
METADATA = {
    "general.architecture": "llama",
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.context_length": 64,
    "llama.rope.freq_base": 100_000.0,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.token_type": [3] * len(CONTROLS) + [1] * (len(VOCABULARY) - len(CONTROLS)),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
}
SHAPES = {"model.embed_tokens.weight": (len(VOCABULARY), HIDDEN), "model.norm.weight": (HIDDEN,)}
for number in range(LAYERS):
    for name, shape in {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }.items():
        SHAPES[f"model.layers.{number}.{name}.weight"] = shape


def random_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def in_file_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of the file: each row of a head's first half is followed by its rotary pair."""
    size = len(rows) // heads
    order = [
        head * size + half * (size // 2) + index
        for head in range(heads)
        for index in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


def stored_tensors() -> list[tuple]:
    tensors = []
    for name, rows in random_weights().items():
        if "q_proj" in name or "k_proj" in name:
            rows = in_file_order(rows, HEADS if "q_proj" in name else KV_HEADS)
        tensors.append((stored_name(name), rows.shape[::-1], F32, rows.astype("<f4").tobytes()))
    return tensors


@pytest.fixture
def write_model(tmp_path):
    def write(metadata=METADATA, tensors=None) -> str:
        path = tmp_path / "small-llama.gguf"
        path.write_bytes(gguf(metadata, stored_tensors() if tensors is None else tensors))
        return str(path)

    return write


def test_weights_have_hugging_faces_names_and_row_order(write_model):
    loaded = load_text_model(write_model())
    named = dict(loaded.model.named_parameters())
    assert named.keys() == SHAPES.keys()
    for name, expected in random_weights().items():
        assert np.array_equal(named[name].numpy(), expected), name
    config = loaded.model.config
    assert (config.rms_norm_eps, config.rope_theta, loaded.context) == (0.5, 100_000.0, 64)
    assert loaded.name == "small-llama"


def test_the_file_includes_the_tokenizer_and_the_chat_template(write_model):
    loaded = load_text_model(write_model())
    prompt = loaded.chat_template.render([{"role": "user", "content": " the 😀"}])
    assert prompt == "<|im_start|> the 😀<|im_end|>"
    ids = loaded.tokenizer.encode(prompt, special=True)
    assert (ids[0], VOCABULARY[ids[1]], ids[-1]) == (1, "Ġthe", 2)
    assert loaded.tokenizer.eos_ids == {0, 2}
    assert loaded.model([(ids, loaded.model.new_kv())]).shape == (1, len(VOCABULARY))


def test_an_embedding_of_another_type_is_read(write_model):
    count = len(VOCABULARY) * HIDDEN // 32
    packed = struct.pack("<e32b", 0.5, *range(-16, 16)) * count
    rest = [tensor for tensor in stored_tensors() if tensor[0] != "token_embd.weight"]
    embedding = ("token_embd.weight", (HIDDEN, len(VOCABULARY)), Q8_0, packed)
    loaded = load_text_model(write_model(tensors=[embedding, *rest]))
    weight = loaded.model.model.embed_tokens.weight
    assert weight[-1].tolist() == [number / 2 for number in range(-16, 16)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "gemma3"}, "is a 'gemma3' model; only 'llama'"),
        ({"llama.block_count": "2"}, "'llama.block_count' is a str"),
        ({"llama.block_count": 3}, r"no tensor 'blk\.2\.attn_norm\.weight'"),
        ({"llama.feed_forward_length": 60}, r"'blk\.0\.ffn_gate\.weight' has the shape"),
        ({"llama.attention.head_count": 0}, "sizes do not fit together"),
        ({"llama.attention.head_count": 5}, "sizes do not fit together: hidden_size 32"),
        ({"llama.attention.head_count_kv": 3}, "sizes do not fit together: 4 attention heads"),
        ({"llama.rope.scaling.type": "linear"}, "scaling"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer is 'llama' with the rules 'smollm'"),
        ({"tokenizer.ggml.eos_token_id": 999}, "the eos token 999 is not among its 261 tokens"),
        ({"tokenizer.ggml.tokens": VOCABULARY[:-1]}, "260 tokens, but 261 embeddings"),
        ({"tokenizer.ggml.tokens": [*VOCABULARY[:-1], "a b"]}, "'a b', is not written"),
        ({"tokenizer.chat_template": "{% if %}"}, "chat template is invalid"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_its_reason(write_model, changes, reason):
    with pytest.raises(ValueError, match=reason):
        load_text_model(write_model({**METADATA, **changes}))


@pytest.mark.parametrize("name", ["output.weight", "rope_freqs.weight"])
def test_a_tensor_that_the_model_would_ignore_is_refused(write_model, name):
    extra = (name, (1,), F32, floats([1.0]))
    with pytest.raises(GGUFError, match="support"):
        load_text_model(write_model(tensors=[*stored_tensors(), extra]))


def test_the_error_for_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpt-4'.* one of tiny, smollm2-135m, or a path"):
        load_text_model("gpt-4")


@pytest.fixture(scope="module")
def smollm2() -> TextModel:
    return load_text_model("smollm2-135m")


def prompt_of(smollm2, question: str) -> list[int]:
    prompt = smollm2.chat_template.render([{"role": "user", "content": question}])
    return smollm2.tokenizer.encode(prompt, special=True)


@pytest.mark.replica
def test_smollm2_answers_with_the_capital_of_france(smollm2):
    inputs, kv, generated = (
        prompt_of(smollm2, "What is the capital of France?"),
        smollm2.model.new_kv(),
        [],
    )
    assert len(inputs) == 37
    while len(generated) < 12 and not smollm2.tokenizer.eos_ids.intersection(generated):
        inputs = [int(smollm2.model([(inputs, kv)])[0].argmax())]
        generated += inputs
    assert smollm2.tokenizer.decode(generated) == "The capital of France is Paris."


@pytest.mark.replica
def test_smollm2_has_the_same_logits_in_a_batch_and_alone(smollm2):
    prompts = [prompt_of(smollm2, question) for question in ("What is 2+2?", "Hi", "Name a sea.")]
    expected = [smollm2.model([(prompt, smollm2.model.new_kv())])[0] for prompt in prompts]
    logits = smollm2.model([(prompt, smollm2.model.new_kv()) for prompt in prompts])
    assert torch.allclose(logits, torch.stack(expected), atol=1e-3)


@pytest.mark.replica
def test_smollm2s_tokenizer_round_trips_any_text_that_it_can_encode(smollm2):
    rng = random.Random(0)
    everyday = [
        chr(code) for code in (*range(0x20, 0x7F), *range(0xA1, 0x600), *range(0x1F600, 0x1F640))
    ]
    for _ in range(50):
        text = "".join(rng.choices([*everyday, " ", "  ", "\n", "\t", "don't", "日本"], k=200))
        assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
    assert (
        smollm2.tokenizer.decode(smollm2.tokenizer.encode("a\x04b\U00050000")) == "a\ufffdb\ufffd"
    )
    assert smollm2.tokenizer.encode("<|im_end|>", special=True) == [2]
