"""A naive Llama on plain numbers, without tensors, batches and caches, for expected results."""

import cmath
import math


def slow_logits(model, tokens) -> list[list[float]]:
    weights = {name: weight.tolist() for name, weight in model.named_parameters()}
    config = model.config
    embedding = weights["model.embed_tokens.weight"]
    stream = [embedding[token] for token in tokens]
    for number in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{number}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{number}.")
        }
        normed = [norm(row, layer["input_layernorm"], config) for row in stream]
        stream = [
            plus(row, change)
            for row, change in zip(stream, attend(layer, normed, config), strict=True)
        ]
        normed = [norm(row, layer["post_attention_layernorm"], config) for row in stream]
        stream = [plus(row, swiglu(layer, x)) for row, x in zip(stream, normed, strict=True)]
    return [times(embedding, norm(row, weights["model.norm.weight"], config)) for row in stream]


def plus(left, right):
    return [a + b for a, b in zip(left, right, strict=True)]


def dot(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))


def times(matrix, column):
    return [dot(row, column) for row in matrix]


def norm(row, weight, config):
    scale = 1 / math.sqrt(dot(row, row) / len(row) + config.rms_norm_eps)
    return [value * scale * factor for value, factor in zip(row, weight, strict=True)]


def swiglu(layer, x):
    gate, up = times(layer["mlp.gate_proj"], x), times(layer["mlp.up_proj"], x)
    inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    return times(layer["mlp.down_proj"], inner)


def rotated(head, position, config):
    """Rotate the plane of features i and i + half by position / theta ** (2 i / size)."""
    half = len(head) // 2
    planes = [
        complex(head[i], head[i + half])
        * cmath.exp(1j * position / config.rope_theta ** (2 * i / len(head)))
        for i in range(half)
    ]
    return [plane.real for plane in planes] + [plane.imag for plane in planes]


def heads_of(matrix, x, size):
    flat = times(matrix, x)
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def attend(layer, rows, config):
    size = config.hidden_size // config.num_attention_heads
    heads_per_kv_head = config.num_attention_heads // config.num_key_value_heads
    keys = [
        [rotated(head, position, config) for head in heads_of(layer["self_attn.k_proj"], x, size)]
        for position, x in enumerate(rows)
    ]
    values = [heads_of(layer["self_attn.v_proj"], x, size) for x in rows]
    out = []
    for position, x in enumerate(rows):
        attended = []
        for number, head in enumerate(heads_of(layer["self_attn.q_proj"], x, size)):
            query, kv_head = rotated(head, position, config), number // heads_per_kv_head
            scores = [
                dot(query, keys[past][kv_head]) / math.sqrt(size) for past in range(position + 1)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            attended += [
                sum(weight * values[past][kv_head][i] for past, weight in enumerate(weights))
                / sum(weights)
                for i in range(size)
            ]
        out.append(times(layer["self_attn.o_proj"], attended))
    return out
