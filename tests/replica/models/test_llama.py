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


def made(config: LlamaConfig = CONFIG, seed: int = 0) -> Llama:
    chance = torch.Generator().manual_seed(seed)
    model = Llama(config)
    for weight in model.parameters():
        weight.normal_(0.0, 0.5, generator=chance)
    return model


@pytest.fixture(scope="module")
def model() -> Llama:
    return made()


def near(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-3, atol=1e-3)


def whole(model: Llama, tokens) -> torch.Tensor:
    """The logits of every position, in one pass."""
    return model([(tokens, model.new_kv())], all_positions=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 6), (6, 1), (1, 1)])
def test_it_computes_what_a_slow_reading_of_the_definition_computes(heads, kv_heads):
    config = LlamaConfig(40, 48, 80, 2, heads, kv_heads, 96, rope_theta=100.0)
    model = made(config, seed=heads + kv_heads)
    tokens = [3, 17, 17, 0, 39, 5, 8]
    assert near(whole(model, tokens), torch.tensor(slow_logits(model, tokens)).float())


@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=7))
@settings(max_examples=examples(40))
def test_a_ragged_batch_gives_what_each_sequence_gives_alone(model, sequences):
    kvs = [model.new_kv() for _ in sequences]
    firsts = model([(first, kv) for (first, _), kv in zip(sequences, kvs, strict=True)])
    thens = model([(then, kv) for (_, then), kv in zip(sequences, kvs, strict=True)])
    for place, (first, then) in enumerate(sequences):
        alone = whole(model, first + then)
        assert near(firsts[place], alone[len(first) - 1])
        assert near(thens[place], alone[-1])
        assert kvs[place].length == len(first) + len(then)


@given(st.lists(token_lists, min_size=1, max_size=6))
@settings(max_examples=examples(40))
def test_a_prompt_may_be_read_in_any_pieces(model, pieces):
    kv = model.new_kv()
    logits = [model([(piece, kv)], all_positions=True) for piece in pieces]
    assert near(torch.cat(logits), whole(model, [*chain(*pieces)]))


def test_a_fork_continues_as_if_its_prefix_had_been_computed_again(model):
    prefix, one, other = [1, 2, 3, 4, 5], [6, 7], [8, 9, 10]
    origin = model.new_kv()
    model([(prefix + one, origin)])
    fork = origin.fork(len(prefix))
    assert near(model([(other, fork)])[0], whole(model, prefix + other)[-1])
    assert near(model([([11], origin)])[0], whole(model, [*prefix, *one, 11])[-1])


def test_after_truncating_the_forgotten_tokens_have_no_influence(model):
    kv = model.new_kv()
    model([([1, 2, 30, 31, 32], kv)])
    kv.truncate(2)
    assert near(model([([3], kv)])[0], whole(model, [1, 2, 3])[-1])


def test_no_position_attends_to_a_later_one(model):
    tokens = [5, 4, 3, 2, 1]
    assert near(whole(model, tokens)[:3], whole(model, [*tokens[:3], 20, 21])[:3])
    assert not near(whole(model, tokens)[3:], whole(model, [*tokens[:3], 20, 21])[3:])


def test_positions_are_in_the_order_of_the_parts(model):
    parts = [([1, 2, 3], model.new_kv()), ([4], model.new_kv()), ([5, 6], model.new_kv())]
    logits = model(parts, all_positions=True)
    assert near(logits, torch.cat([whole(model, tokens) for tokens, _ in parts]))


@pytest.fixture
def cpu_facts(monkeypatch, tmp_path):
    """The file that names the maker of the CPU."""
    monkeypatch.setattr(llama, "CPU_FACTS", tmp_path / "cpuinfo")
    llama.needs_left_operand.cache_clear()
    yield tmp_path / "cpuinfo"
    llama.needs_left_operand.cache_clear()


@pytest.mark.parametrize("maker", ["GenuineIntel", "AuthenticAMD"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_every_way_to_multiply_gives_the_same(tokens, maker, cpu_facts, monkeypatch):
    cpu_facts.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    x, weight = torch.randn(tokens, 16), torch.randn(24, 16)
    monkeypatch.setattr(llama, "LARGE_WEIGHT", 0)
    product = llama.project(x, weight)
    assert torch.allclose(product, x @ weight.T, atol=1e-4)
    assert product.is_contiguous()
    assert llama.needs_left_operand() == (maker == "AuthenticAMD")


def test_a_machine_that_does_not_name_its_cpu_multiplies_from_the_left(cpu_facts):
    assert not cpu_facts.exists()
    assert llama.needs_left_operand()


def test_hidden_rows_lead_to_the_logits(model):
    rows = model.hidden([7, 8, 9])
    assert rows.shape == (3, CONFIG.hidden_size)
    assert near(rows @ model.model.embed_tokens.weight.T, whole(model, [7, 8, 9]))


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


@pytest.mark.parametrize("moved", [False, True])
def test_a_weight_written_in_place_by_name_counts_at_once(moved):
    model, other = made(), made(seed=1)
    if moved:
        model.to(torch.float64).to(torch.float32)
    sent = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        before = whole(model, [1, 2, 3])
        weight.copy_(sent[name])
        assert not torch.equal(whole(model, [1, 2, 3]), before), name
    assert torch.equal(whole(model, [1, 2, 3]), whole(other, [1, 2, 3]))


def test_a_model_of_another_precision_keeps_its_kv_in_that():
    single, double = made(), made().to(torch.float64)
    logits = whole(double, [1, 2, 3])
    assert logits.dtype == torch.float64
    assert near(logits.float(), whole(single, [1, 2, 3]))


def test_the_logits_may_be_changed_in_place(model):
    logits = model([([1], model.new_kv())])
    logits.div_(2.0)
    model.hidden([1]).mul_(2.0)


def test_a_full_context_is_named_and_leaves_every_sequence_as_it_was(model):
    full, other = model.new_kv(), model.new_kv()
    model([([1] * 95, full), ([2, 3], other)])
    with pytest.raises(ContextFull, match="97 tokens do not fit: the model's context is 96"):
        model([([4], other), ([5, 6], full)])
    assert (full.length, other.length) == (95, 2)
    assert near(model([([4], other), ([5], full)])[0], whole(model, [2, 3, 4])[-1])
    assert full.length == 96


def test_a_wrong_batch_is_refused_before_anything_changes(model):
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
def test_sizes_that_do_not_fit_together_are_refused(hidden, heads, kv_heads):
    with pytest.raises(ValueError, match="heads"):
        LlamaConfig(40, hidden, 80, 2, heads, kv_heads, 96)
