"""Whisper's network in float32: spectra in, logits of the next token out; and its model file.

Invariant: tokens appended one by one to a `DecodingState` get the same logits as if appended
together; every length in the file is checked before reading, and an unsupported variable is an
error. The file is CTranslate2's `model.bin`, version 6, with two files beside it (note:models 3).
Log-mel spectra are those of Whisper's training: 16 kHz, windows of 400 samples every 160, 80 bands.
They always cover 30 s, with silence after shorter audio, because the decoder repeats itself on
short windows. This module does not interpret tokens.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from omni_proxy.replica.audio import Samples

VERSION = 6
SPEC = "WhisperSpec"
# CTranslate2's numbers for its element types.
ELEMENT_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
GELU = 3  # CTranslate2's number for the exact GELU
# The settings that the forward pass below implements; a file with others is refused.
EXPECTED = {
    "decoder/activation": GELU,
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
RATE = 16_000
BANDS = 80
WINDOW_SECS = 30
WINDOW_SAMPLES = WINDOW_SECS * RATE
FLOOR = 1e-10
RANGE_DECADES = 8.0  # quieter values are raised to this distance from the loudest
_LOG_STEP = np.log(6.4) / 27.0
FFT_SAMPLES, HOP_SAMPLES = 400, 160
# Slaney's scale: linear up to 1 kHz, which is 15 mel, and then 27 mel for every factor of 6.4.
_LINEAR_HERTZ, _LINEAR_MEL = 1000.0, 15.0


class WhisperFileError(Exception):
    """The model's files are not readable; the message has the file and the reason."""


@dataclass(frozen=True, slots=True)
class WhisperFile:
    """Variables by their names in the file (views of it), vocabulary, and suppressed ids.

    `suppressed` ids are never emitted, `suppressed_first` not as the first token of a window.
    """

    variables: Mapping[str, NDArray[Any]]
    vocabulary: tuple[str, ...]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]


def read_whisper_file(path: Path) -> WhisperFile:
    """Read `path` (a model.bin) with vocabulary.txt and config.json beside it.

    Raises WhisperFileError.
    """
    try:
        with path.open("rb") as file:
            # Copy-on-write, hence writable: torch warns about read-only arrays.
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        words = path.with_name("vocabulary.txt").read_text("utf-8").split("\n")
        config = json.loads(path.with_name("config.json").read_text("utf-8"))
        suppressed = tuple(int(token) for token in config["suppress_ids"])
        first = tuple(int(token) for token in config["suppress_ids_begin"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WhisperFileError(f"cannot read the model at {path}: {error}") from error
    variables = read_variables(data)
    return WhisperFile(variables, tuple(words[:-1]), suppressed, first)


def read_variables(data: memoryview) -> dict[str, NDArray[Any]]:
    """Return every variable of a model.bin, aliases included; raises WhisperFileError."""
    cursor = _Cursor(data)
    version = cursor.number("I")
    if version != VERSION:
        raise WhisperFileError(f"the model file has version {version}, not {VERSION}")
    spec = cursor.name()
    if spec != SPEC:
        raise WhisperFileError(f"the model file contains a {spec!r}, not a {SPEC}")
    cursor.number("I")  # the revision of the spec
    variables = {}
    for _ in range(cursor.number("I")):
        name, variable = cursor.variable()
        variables[name] = variable
    for _ in range(cursor.number("I")):
        alias, name = cursor.name(), cursor.name()
        if name not in variables:
            raise WhisperFileError(f"the model file refers to {name!r}, which it does not contain")
        variables[alias] = variables[name]
    if cursor.at != len(data):
        raise WhisperFileError(f"the model file continues after its end at byte {cursor.at}")
    return variables


class _Cursor:
    """Reads the file in sequence; raises WhisperFileError at its end."""

    __slots__ = ("_data", "at")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def number(self, kind: str) -> int:
        return int(struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind)))[0])

    def name(self) -> str:
        """Return a string with a length prefix and a NUL terminator within that length."""
        text = bytes(self._take(self.number("H")))
        try:
            return text.removesuffix(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise WhisperFileError(f"the model file has an unreadable name {text!r}") from error

    def variable(self) -> tuple[str, NDArray[Any]]:
        name = self.name()
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind = self.number("B")
        body = self._take(self.number("I"))
        if kind not in ELEMENT_TYPES:
            raise WhisperFileError(f"{name} has elements of an unknown type, {kind}")
        elements = np.dtype(ELEMENT_TYPES[kind])
        expected_bytes = elements.itemsize
        for length in shape:
            expected_bytes *= length
        if len(body) != expected_bytes:
            raise WhisperFileError(f"{name} has {len(body)} bytes for its shape {shape}")
        try:
            return name, np.frombuffer(body, elements).reshape(shape)
        except ValueError as error:  # too many dimensions, or too large beside a dimension of 0
            raise WhisperFileError(f"{name} can't have the shape {shape}: {error}") from error

    def _take(self, length: int) -> memoryview:
        end = self.at + length
        if end > len(self._data):
            raise WhisperFileError(
                f"the model file is truncated: it has {len(self._data)} bytes, {end} are needed"
            )
        taken = self._data[self.at : end]
        self.at = end
        return taken


@dataclass(slots=True)
class DecodingState:
    """The state of decoding one window: keys and values [1, heads, n, 64] of every layer."""

    cross_attention: list[tuple[Tensor, Tensor]]
    self_attention: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    length: int = 0


class WhisperNet:
    """Encoder and decoder; `variables` are those of a model file by name."""

    def __init__(self, variables: Mapping[str, NDArray[Any]]) -> None:
        for name, expected in EXPECTED.items():
            if name not in variables or int(variables[name]) != expected:
                raise WhisperFileError(f"the model differs from Whisper in {name}")
        self._weights = {
            name: torch.from_numpy(variable).float()
            for name, variable in variables.items()
            if variable.dtype.kind == "f"
        }
        try:
            self._heads = int(variables["encoder/num_heads"])
            self._embedding = self._weights["decoder/embeddings/weight"]
            self._places = self._weights["decoder/position_encodings/encodings"]
        except KeyError as error:
            raise WhisperFileError(f"the model has no {error}") from error
        self._layers = {side: self._count_layers(side) for side in ("encoder", "decoder")}

    @property
    def vocab_size(self) -> int:
        return len(self._embedding)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one window, including its prompt."""
        return len(self._places)

    def _count_layers(self, side: str) -> int:
        prefix = f"{side}/layer_"
        numbers = [
            number
            for name in self._weights
            if name.startswith(prefix)
            and (number := name[len(prefix) :].partition("/")[0]).isdecimal()
        ]
        return 1 + max(map(int, numbers))

    @torch.inference_mode()
    def encode(self, mel: Tensor) -> DecodingState:
        """Encode the spectrum [80, 3000] of one window and return its decoding state."""
        sound = F.gelu(self._convolve(mel[None], "encoder/conv1", 1))
        sound = F.gelu(self._convolve(sound, "encoder/conv2", 2))[0].T
        sound = sound + self._weights["encoder/position_encodings/encodings"]
        for place in range(self._layers["encoder"]):
            layer = f"encoder/layer_{place}"
            inside = self._normed(sound, f"{layer}/self_attention")
            queries, keys, values = self._parts(inside, f"{layer}/self_attention/linear_0", 3)
            mixed = F.scaled_dot_product_attention(queries, keys, values)
            sound = sound + self._joined(mixed, f"{layer}/self_attention/linear_1")
            sound = sound + self._feed_forward(sound, layer)
        sound = self._normed(sound, "encoder")
        layers = []
        for place in range(self._layers["decoder"]):
            keys, values = self._parts(sound, f"decoder/layer_{place}/attention/linear_1", 2)
            layers.append((keys, values))
        return DecodingState(layers)

    @torch.inference_mode()
    def decode(self, tokens: list[int], decoding: DecodingState) -> Tensor:
        """Append `tokens`; return the logits [n, vocab_size] after each."""
        end = decoding.length + len(tokens)
        state = self._embedding[tokens] + self._places[decoding.length : end]
        before = decoding.self_attention
        decoding.self_attention = []
        for place in range(self._layers["decoder"]):
            layer = f"decoder/layer_{place}"
            inside = self._normed(state, f"{layer}/self_attention")
            queries, keys, values = self._parts(inside, f"{layer}/self_attention/linear_0", 3)
            if before:
                keys = torch.cat((before[place][0], keys), dim=2)
                values = torch.cat((before[place][1], values), dim=2)
            decoding.self_attention.append((keys, values))
            # Causal mask: each token attends to itself and the tokens before it.
            seen = torch.ones(len(tokens), end, dtype=torch.bool).tril(decoding.length)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
            state = state + self._joined(mixed, f"{layer}/self_attention/linear_1")
            inside = self._normed(state, f"{layer}/attention")
            (queries,) = self._parts(inside, f"{layer}/attention/linear_0", 1)
            mixed = F.scaled_dot_product_attention(queries, *decoding.cross_attention[place])
            state = state + self._joined(mixed, f"{layer}/attention/linear_2")
            state = state + self._feed_forward(state, layer)
        decoding.length = end
        return self._normed(state, "decoder") @ self._embedding.T

    def _convolve(self, sound: Tensor, name: str, stride: int) -> Tensor:
        weights = self._weights
        return F.conv1d(sound, weights[f"{name}/weight"], weights[f"{name}/bias"], stride, 1)

    def _linear(self, state: Tensor, name: str) -> Tensor:
        return F.linear(state, self._weights[f"{name}/weight"], self._weights[f"{name}/bias"])

    def _normed(self, state: Tensor, name: str) -> Tensor:
        gamma, beta = (self._weights[f"{name}/layer_norm/{part}"] for part in ("gamma", "beta"))
        return F.layer_norm(state, gamma.shape, gamma, beta)

    def _parts(self, state: Tensor, name: str, count: int) -> list[Tensor]:
        """Apply one fused projection and split it into `count` tensors [1, heads, n, 64].

        Without the leading dimension of 1, torch does not use its fast attention.
        """
        fused = self._linear(state, name).view(1, len(state), count, self._heads, -1)
        return list(fused.permute(2, 0, 3, 1, 4))

    def _joined(self, mixed: Tensor, name: str) -> Tensor:
        return self._linear(mixed[0].transpose(0, 1).flatten(1), name)

    def _feed_forward(self, state: Tensor, layer: str) -> Tensor:
        inside = F.gelu(self._linear(self._normed(state, f"{layer}/ffn"), f"{layer}/ffn/linear_0"))
        return self._linear(inside, f"{layer}/ffn/linear_1")


def log_mel(samples: Samples) -> NDArray[np.float32]:
    """Return [80, 3000], float32, of at most 30 s of samples at 16 kHz."""
    if len(samples) > WINDOW_SAMPLES:
        raise ValueError(f"{len(samples)} samples are more than a window of {WINDOW_SAMPLES}")
    whole = np.zeros(WINDOW_SAMPLES, np.float32)
    whole[: len(samples)] = samples
    return log_compress(mel_power(whole))


def mel_power(samples: Samples) -> NDArray[np.float32]:
    """Return [80, n // 160]: the power in every band around every 160th of n samples."""
    around = np.pad(samples, FFT_SAMPLES // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(around, FFT_SAMPLES)[::HOP_SAMPLES]
    spectrum = np.fft.rfft(frames[: len(samples) // HOP_SAMPLES] * _hann())
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    in_bands: NDArray[np.float32] = mel_filters() @ power.T
    return in_bands


def log_compress(power: NDArray[np.float32]) -> NDArray[np.float32]:
    """Take the logarithm, clip to 8 decades below the loudest, and centre."""
    decades = np.log10(np.maximum(power, FLOOR))
    decades = np.maximum(decades, decades.max() - RANGE_DECADES)
    centred: NDArray[np.float32] = ((decades + 4.0) / 4.0).astype(np.float32)
    return centred


@cache
def _hann() -> NDArray[np.float32]:
    # A periodic window: drop np.hanning's last sample, which equals the first of the next period.
    return np.hanning(FFT_SAMPLES + 1)[:-1].astype(np.float32)


@cache
def mel_filters() -> NDArray[np.float32]:
    """Return [80, 201]: triangles of equal area, spaced evenly on Slaney's mel scale."""
    bins = np.linspace(0, RATE / 2, FFT_SAMPLES // 2 + 1)
    corners = _hertz(np.linspace(0, _mel(RATE / 2), BANDS + 2))
    slopes = (bins[None, :] - corners[:, None]) / np.diff(corners, append=np.inf)[:, None]
    rising = slopes[:-2]
    falling = 1 - slopes[1:-1]
    triangles = np.maximum(0, np.minimum(rising, falling))
    area = 2 / (corners[2:] - corners[:-2])
    filters: NDArray[np.float32] = (triangles * area[:, None]).astype(np.float32)
    return filters


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * _LINEAR_MEL / _LINEAR_HERTZ
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HERTZ) / _LOG_STEP)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mel * _LINEAR_HERTZ / _LINEAR_MEL
    above = _LINEAR_HERTZ * np.exp(_LOG_STEP * np.maximum(mel - _LINEAR_MEL, 0))
    return np.where(mel < _LINEAR_MEL, linear, above)
