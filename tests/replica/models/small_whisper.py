"""A seeded Whisper of two narrow layers, and a writer of the file format of real models."""

import struct

import numpy as np

from omni_proxy.replica.models.whisper_net import WhisperFile

WIDTH, HEADS, LAYERS, BANDS = 16, 2, 2, 80
# So that the text depends on the position and the audio, and does not end at once.
POSITION_SCALE, HEARING_SCALE = 2.0, 2.0
CONTROLS = ("<|endoftext|>", "<|startoftranscript|>", "<|nocaptions|>", "<|notimestamps|>")
WORDS = tuple(f"Ġ{a}{b}" for a in "bdfgklmn" for b in "aeiou")
VOCABULARY = (*WORDS, *CONTROLS)
KINDS = {"<f4": 0, "|i1": 1, "<i2": 2, "<i4": 3, "<f2": 4}


def small_whisper(suppressed=(), suppressed_first=()) -> WhisperFile:
    return WhisperFile(variables(), VOCABULARY, suppressed, suppressed_first)


def variables(seed: int = 2):
    chance = np.random.default_rng(seed)

    def drawn(*shape, scale=0.4):
        return (chance.standard_normal(shape) * scale).astype("<f2")

    made = {
        "decoder/activation": np.int8(3),
        "decoder/alibi": np.int8(0),
        "decoder/pre_norm": np.int8(1),
        "decoder/scale_embeddings": np.int8(0),
        "decoder/start_from_zero_embedding": np.int8(0),
        "encoder/num_heads": np.int16(HEADS),
        "encoder/conv1/weight": drawn(WIDTH, BANDS, 3, scale=0.1),
        "encoder/conv1/bias": drawn(WIDTH),
        "encoder/conv2/weight": drawn(WIDTH, WIDTH, 3),
        "encoder/conv2/bias": drawn(WIDTH),
        "encoder/position_encodings/encodings": drawn(1500, WIDTH),
        "decoder/position_encodings/encodings": drawn(448, WIDTH, scale=POSITION_SCALE),
        "decoder/embeddings/weight": drawn(len(VOCABULARY), WIDTH),
    }

    def linear(name, rows, columns=WIDTH, scale=0.4):
        made[f"{name}/weight"] = drawn(rows, columns, scale=scale)
        made[f"{name}/bias"] = drawn(rows)

    def norm(name, beta_scale=0.4):
        made[f"{name}/layer_norm/gamma"] = drawn(WIDTH, scale=0.1) + np.float16(1)
        made[f"{name}/layer_norm/beta"] = drawn(WIDTH, scale=beta_scale)

    for side in ("encoder", "decoder"):
        norm(side, beta_scale=0.05)  # more of it at the end would always favour one token
        for layer in (f"{side}/layer_{place}" for place in range(LAYERS)):
            norm(f"{layer}/self_attention")
            linear(f"{layer}/self_attention/linear_0", 3 * WIDTH)
            linear(f"{layer}/self_attention/linear_1", WIDTH)
            norm(f"{layer}/ffn")
            linear(f"{layer}/ffn/linear_0", 4 * WIDTH)
            linear(f"{layer}/ffn/linear_1", WIDTH, 4 * WIDTH)
            if side == "decoder":
                norm(f"{layer}/attention")
                linear(f"{layer}/attention/linear_0", WIDTH, scale=HEARING_SCALE)
                linear(f"{layer}/attention/linear_1", 2 * WIDTH, scale=HEARING_SCALE)
                linear(f"{layer}/attention/linear_2", WIDTH, scale=HEARING_SCALE)
    return made


def model_bin(variables, aliases=(), version=6, spec="WhisperSpec") -> bytes:
    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    parts = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(variables))]
    for name, variable in variables.items():
        held = np.asarray(variable)
        shape = struct.pack(f"<B{held.ndim}I", held.ndim, *held.shape)
        kind = struct.pack("<BI", KINDS[held.dtype.str], held.nbytes)
        parts += [text(name), shape, kind, held.tobytes()]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [text(alias) + text(name) for alias, name in aliases]
    return b"".join(parts)
