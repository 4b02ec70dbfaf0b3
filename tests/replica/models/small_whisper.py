"""A Whisper of two narrow layers with seeded weights, and a writer of the file format of models."""

import struct

import numpy as np

from omni_proxy.replica.models.whisper_net import WhisperFile

WIDTH, HEADS, LAYERS, BANDS = 16, 2, 2, 80
# These scales make the text depend on the position and the audio, and not end at once.
POSITION_SCALE, AUDIO_SCALE = 2.0, 2.0
CONTROLS = ("<|endoftext|>", "<|startoftranscript|>", "<|nocaptions|>", "<|notimestamps|>")
WORDS = tuple(f"Ġ{a}{b}" for a in "bdfgklmn" for b in "aeiou")
VOCABULARY = (*WORDS, *CONTROLS)
KINDS = {"<f4": 0, "|i1": 1, "<i2": 2, "<i4": 3, "<f2": 4}


def small_whisper(suppressed=(), suppressed_first=()) -> WhisperFile:
    return WhisperFile(variables(), VOCABULARY, suppressed, suppressed_first)


def variables(seed: int = 2):
    rng = np.random.default_rng(seed)

    def random_array(*shape, scale=0.4):
        return (rng.standard_normal(shape) * scale).astype("<f2")

    weights = {
        "decoder/activation": np.int8(3),
        "decoder/alibi": np.int8(0),
        "decoder/pre_norm": np.int8(1),
        "decoder/scale_embeddings": np.int8(0),
        "decoder/start_from_zero_embedding": np.int8(0),
        "encoder/num_heads": np.int16(HEADS),
        "encoder/conv1/weight": random_array(WIDTH, BANDS, 3, scale=0.1),
        "encoder/conv1/bias": random_array(WIDTH),
        "encoder/conv2/weight": random_array(WIDTH, WIDTH, 3),
        "encoder/conv2/bias": random_array(WIDTH),
        "encoder/position_encodings/encodings": random_array(1500, WIDTH),
        "decoder/position_encodings/encodings": random_array(448, WIDTH, scale=POSITION_SCALE),
        "decoder/embeddings/weight": random_array(len(VOCABULARY), WIDTH),
    }

    def linear(name, rows, columns=WIDTH, scale=0.4):
        weights[f"{name}/weight"] = random_array(rows, columns, scale=scale)
        weights[f"{name}/bias"] = random_array(rows)

    def norm(name, beta_scale=0.4):
        weights[f"{name}/layer_norm/gamma"] = random_array(WIDTH, scale=0.1) + np.float16(1)
        weights[f"{name}/layer_norm/beta"] = random_array(WIDTH, scale=beta_scale)

    for part in ("encoder", "decoder"):
        norm(part, beta_scale=0.05)  # a larger scale would always favour one token
        for layer in (f"{part}/layer_{index}" for index in range(LAYERS)):
            norm(f"{layer}/self_attention")
            linear(f"{layer}/self_attention/linear_0", 3 * WIDTH)
            linear(f"{layer}/self_attention/linear_1", WIDTH)
            norm(f"{layer}/ffn")
            linear(f"{layer}/ffn/linear_0", 4 * WIDTH)
            linear(f"{layer}/ffn/linear_1", WIDTH, 4 * WIDTH)
            if part == "decoder":
                norm(f"{layer}/attention")
                linear(f"{layer}/attention/linear_0", WIDTH, scale=AUDIO_SCALE)
                linear(f"{layer}/attention/linear_1", 2 * WIDTH, scale=AUDIO_SCALE)
                linear(f"{layer}/attention/linear_2", WIDTH, scale=AUDIO_SCALE)
    return weights


def model_bin(variables, aliases=(), version=6, spec="WhisperSpec") -> bytes:
    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    parts = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(variables))]
    for name, variable in variables.items():
        array = np.asarray(variable)
        shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        kind = struct.pack("<BI", KINDS[array.dtype.str], array.nbytes)
        parts += [text(name), shape, kind, array.tobytes()]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [text(alias) + text(name) for alias, name in aliases]
    return b"".join(parts)
