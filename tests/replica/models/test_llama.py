from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.models import llama
from omni_proxy.replica.models.kv import ContextFull
from omni_proxy.replica.models.llama import Llama, LlamaConfig
from tests.example_counts import examples
from tests.replica.models.slow_llama import slow_logits

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=96,
    rope_theta=100.0,
)
token_lists = st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=12)


def random_llama(config: LlamaConfig = CONFIG, seed: int = 0) -> Llama:
    rng = torch.Generator().manual_seed(seed)
    model = Llama(config)
    for weight in model.parameters():
        weight.normal_(0.0, 0.5, generator=rng)
    return model


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama()


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-3, atol=1e-3)


def full_logits(model: Llama, tokens) -> torch.Tensor:
    """The logits of every position, in one pass."""
    return model([(tokens, model.new_kv())], all_positions=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 6), (6, 1), (1, 1)])
def test_the_logits_match_a_naive_implementation(heads, kv_heads):
    config = LlamaConfig(40, 48, 80, 2, heads, kv_heads, 96, rope_theta=100.0)
    model = random_llama(config, seed=heads + kv_heads)
    tokens = [3, 17, 17, 0, 39, 5, 8]
    assert close(full_logits(model, tokens), torch.tensor(slow_logits(model, tokens)).float())


@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=7))
@settings(max_examples=examples(40))
def test_a_ragged_batch_gives_the_logits_of_each_sequence_alone(model, sequences):
    kvs = [model.new_kv() for _ in sequences]
    first_logits = model([(first, kv) for (first, _), kv in zip(sequences, kvs, strict=True)])
    continuation_logits = model(
        [(continuation, kv) for (_, continuation), kv in zip(sequences, kvs, strict=True)]
    )
    for index, (first, continuation) in enumerate(sequences):
        expected = full_logits(model, first + continuation)
        assert close(first_logits[index], expected[len(first) - 1])
        assert close(continuation_logits[index], expected[-1])
        assert kvs[index].length == len(first) + len(continuation)


@given(st.lists(token_lists, min_size=1, max_size=6))
@settings(max_examples=examples(40))
def test_a_prompt_may_be_prefilled_in_any_chunks(model, chunks):
    kv = model.new_kv()
    logits = [model([(chunk, kv)], all_positions=True) for chunk in chunks]
    assert close(torch.cat(logits), full_logits(model, [*chain(*chunks)]))


def test_a_fork_continues_like_a_recomputed_prefix(model):
    prefix, continuation, other_continuation = [1, 2, 3, 4, 5], [6, 7], [8, 9, 10]
    origin = model.new_kv()
    model([(prefix + continuation, origin)])
    fork = origin.fork(len(prefix))
    assert close(
        model([(other_continuation, fork)])[0], full_logits(model, prefix + other_continuation)[-1]
    )
    assert close(model([([11], origin)])[0], full_logits(model, [*prefix, *continuation, 11])[-1])


def test_truncated_tokens_have_no_influence(model):
    kv = model.new_kv()
    model([([1, 2, 30, 31, 32], kv)])
    kv.truncate(2)
    assert close(model([([3], kv)])[0], full_logits(model, [1, 2, 3])[-1])


def test_no_position_attends_to_a_later_one(model):
    tokens = [5, 4, 3, 2, 1]
    assert close(full_logits(model, tokens)[:3], full_logits(model, [*tokens[:3], 20, 21])[:3])
    assert not close(full_logits(model, tokens)[3:], full_logits(model, [*tokens[:3], 20, 21])[3:])


def test_positions_are_in_the_order_of_the_parts(model):
    parts = [([1, 2, 3], model.new_kv()), ([4], model.new_kv()), ([5, 6], model.new_kv())]
    logits = model(parts, all_positions=True)
    assert close(logits, torch.cat([full_logits(model, tokens) for tokens, _ in parts]))


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path):
    """A replacement for /proc/cpuinfo, which names the vendor of the CPU."""
    monkeypatch.setattr(llama, "CPU_FACTS", tmp_path / "cpuinfo")
    llama.needs_left_operand.cache_clear()
    yield tmp_path / "cpuinfo"
    llama.needs_left_operand.cache_clear()


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_every_order_of_operands_gives_the_same_product(tokens, vendor, cpuinfo, monkeypatch):
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    x, weight = torch.randn(tokens, 16), torch.randn(24, 16)
    monkeypatch.setattr(llama, "LARGE_WEIGHT", 0)
    product = llama.project(x, weight)
    assert torch.allclose(product, x @ weight.T, atol=1e-4)
    assert product.is_contiguous()
    assert llama.needs_left_operand() == (vendor == "AuthenticAMD")


def test_without_a_known_cpu_vendor_the_weight_is_the_left_operand(cpuinfo):
    assert not cpuinfo.exists()
    assert llama.needs_left_operand()


def test_hidden_rows_times_the_embedding_are_the_logits(model):
    rows = model.hidden([7, 8, 9])
    assert rows.shape == (3, CONFIG.hidden_size)
    assert close(rows @ model.model.embed_tokens.weight.T, full_logits(model, [7, 8, 9]))


def test_names_and_shapes_are_those_of_a_tied_hugging_face_llama(model):
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    layer = {
        "input_layernorm": (48,),
        "self_attn.q_proj": (48, 48),
        "self_attn.k_proj": (16, 48),
        "self_attn.v_proj": (16, 48),
        "self_attn.o_proj": (48, 48),
        "post_attention_layernorm": (48,),
        "mlp.gate_proj": (80, 48),
        "mlp.up_proj": (80, 48),
        "mlp.down_proj": (48, 80),
    }
    expected = {"model.embed_tokens.weight": (40, 48), "model.norm.weight": (48,)}
    for number in range(3):
        for name, shape in layer.items():
            expected[f"model.layers.{number}.{name}.weight"] = shape
    assert shapes == expected
    assert llama.TIED_NAMES["lm_head.weight"] in shapes


@pytest.mark.parametrize("converted", [False, True])
def test_a_weight_written_in_place_takes_effect_at_once(converted):
    model, other = random_llama(), random_llama(seed=1)
    if converted:
        model.to(torch.float64).to(torch.float32)
    sent = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        before = full_logits(model, [1, 2, 3])
        weight.copy_(sent[name])
        assert not torch.equal(full_logits(model, [1, 2, 3]), before), name
    assert torch.equal(full_logits(model, [1, 2, 3]), full_logits(other, [1, 2, 3]))


def test_a_float64_model_has_its_kv_in_float64():
    single, double = random_llama(), random_llama().to(torch.float64)
    logits = full_logits(double, [1, 2, 3])
    assert logits.dtype == torch.float64
    assert close(logits.float(), full_logits(single, [1, 2, 3]))


def test_the_logits_may_be_changed_in_place(model):
    logits = model([([1], model.new_kv())])
    logits.div_(2.0)
    model.hidden([1]).mul_(2.0)


def test_a_full_context_is_an_error_that_changes_no_sequence(model):
    full, other = model.new_kv(), model.new_kv()
    model([([1] * 95, full), ([2, 3], other)])
    with pytest.raises(ContextFull, match="97 tokens do not fit: the model's context is 96"):
        model([([4], other), ([5, 6], full)])
    assert (full.length, other.length) == (95, 2)
    assert close(model([([4], other), ([5], full)])[0], full_logits(model, [2, 3, 4])[-1])
    assert full.length == 96


def test_an_invalid_batch_is_refused_before_anything_changes(model):
    kv = model.new_kv()
    for parts, reason in (
        ([], "without parts"),
        ([([], kv)], "has no token"),
        ([([1], kv), ([2], kv)], "the same KV"),
        ([([1, 40], kv)], "token 40 is not in the vocabulary of 40"),
        ([([-1], kv)], "token -1 is not"),
    ):
        with pytest.raises(ValueError, match=reason):
            model(parts)
    assert kv.length == 0


@pytest.mark.parametrize(("hidden", "heads", "kv_heads"), [(48, 5, 5), (48, 16, 16), (48, 6, 4)])
def test_inconsistent_sizes_are_refused(hidden, heads, kv_heads):
    with pytest.raises(ValueError, match="heads"):
        LlamaConfig(40, hidden, 80, 2, heads, kv_heads, 96)
