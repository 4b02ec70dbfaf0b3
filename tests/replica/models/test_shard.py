import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.llama import Llama, LlamaConfig
from omni_proxy.replica.models.shard import Shard, sizes_for

SMOLLM2 = LlamaConfig(49152, 576, 1536, 30, 9, 3, 8192)


@st.composite
def split_models(draw):
    """The configuration of a small model, and a number of ranks that divides it."""
    kv_heads, shared = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = kv_heads * shared
    config = LlamaConfig(
        vocab_size=draw(st.integers(1, 9)),
        hidden_size=2 * heads * draw(st.integers(1, 3)),
        intermediate_size=draw(st.integers(1, 4)) * 12,
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8,
    )
    return config, draw(st.sampled_from(sizes_for(config)))


@given(split_models())
def test_gathering_the_shards_restores_every_tensor(split):
    config, size = split
    shards = [Shard(config, rank, size) for rank in range(size)]
    for name, weight in Llama(config).named_parameters():
        whole = torch.arange(weight.numel()).view(weight.shape)
        parts = [shard.shard_of(name, whole).contiguous() for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            assert torch.equal(shard.gather(name, parts), whole)
            assert shard.whole_shape(name, part.shape) == tuple(whole.shape)


@given(split_models())
def test_only_key_value_heads_fewer_than_the_ranks_are_held_twice(split):
    config, size = split
    shards = [Shard(config, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads] == [
        *range(config.num_attention_heads)
    ]
    assert [row for shard in shards for row in shard.inner] == [*range(config.intermediate_size)]
    shared = config.num_attention_heads // config.num_key_value_heads
    for shard in shards:
        assert {head // shared for head in shard.heads} == {*shard.kv_heads}
    kv_heads = [head for shard in shards for head in shard.kv_heads]
    assert len(kv_heads) == max(size, config.num_key_value_heads)


@given(split_models())
def test_columns_are_split_like_the_rows_that_produce_them(split):
    config, size = split
    for rank in range(size):
        shard = Shard(config, rank, size)
        layer = "model.layers.0"
        up, down = (
            shard.slice_of(f"{layer}.mlp.{name}.weight") for name in ("up_proj", "down_proj")
        )
        assert (up.dim, down.dim) == (0, 1)
        assert (up.start, up.stop) == (down.start, down.stop)
        queries = shard.slice_of(f"{layer}.self_attn.q_proj.weight")
        attention_output = shard.slice_of(f"{layer}.self_attn.o_proj.weight")
        assert (queries.dim, attention_output.dim) == (0, 1)
        assert (queries.start, queries.stop) == (attention_output.start, attention_output.stop)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
     "model.layers.0.input_layernorm.weight", "q_proj"],
)  # fmt: skip
def test_embeddings_norms_and_unknown_names_are_held_whole(name):
    shard = Shard(tiny.CONFIG, 1, 2)
    tensor = torch.zeros(8, 4)
    assert shard.slice_of(name) is None
    assert shard.shard_of(name, tensor) is tensor
    assert shard.whole_shape(name, (8, 4)) == (8, 4)


def test_the_built_in_models_can_be_split():
    assert sizes_for(tiny.CONFIG) == [1, 2, 4]
    assert sizes_for(SMOLLM2) == [1, 3]


@pytest.mark.parametrize("size", [0, 2, 9])
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(size):
    reason = (
        rf"--tp {size} does not divide .* 9 attention heads, 3 key-value .*over 1 or 3 processes"
    )
    with pytest.raises(ValueError, match=reason):
        Shard(SMOLLM2, 0, size)


def test_a_rank_must_be_less_than_the_size():
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Shard(tiny.CONFIG, 2, 2)
