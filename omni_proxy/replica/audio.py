"""Audio as arrays of float32 samples within -1 and 1: WAV and raw PCM, and sample rate conversion.

Invariant: output is 16-bit mono (note:api-server 1.4). Input is validated, and an unsupported or
truncated file is an `AudioError` with a message for the client; no format is guessed. Resampling is
linear interpolation, which is sufficient for speech: the first sample keeps its position, and no
sample leaves the range of the input. This module does not depend on models or requests.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float32]
OTHER_CODECS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "ADPCM", 0x50: "MPEG", 0x55: "MP3"}
# The last 14 bytes of every extensible sub-format that only repeats a plain format code.
SUBFORMAT_TAIL = bytes.fromhex("000000001000800000aa00389b71")
MAX_CHANNELS = 64
# Programs that write to a pipe do not know the length in advance: they set it to about 2 or 4 GiB.
UNKNOWN_SIZE = 0x7FFF0000
SUPPORTED = (
    "supported are WAV files of 8, 16, 24 or 32 bit PCM or 32 bit float samples, "
    f"with any number of channels up to {MAX_CHANNELS}"
)
FULL_SCALE = {8: 1 << 7, 16: 1 << 15, 24: 1 << 31, 32: 1 << 31}  # 24 bit is read as 32, low byte 0
_MAGIC = (
    (b"ID3", 0, "MP3"),
    (b"OggS", 0, "Ogg (Opus or Vorbis)"),
    (b"fLaC", 0, "FLAC"),
    (b"ftyp", 4, "MP4/M4A"),
    (b"\x1a\x45\xdf\xa3", 0, "WebM/Matroska"),
    (b"FORM", 0, "AIFF"),
    (b"RF64", 0, "RF64 (a WAV file above 4 GiB)"),
    (b"RIFX", 0, "RIFX (a big-endian WAV file)"),
)


def resample(samples: Samples, from_rate: float, to_rate: float) -> Samples:
    """Return `samples` [n] at `to_rate` Hz: [round(n * to_rate / from_rate)], float32.

    Raises ValueError for a rate that is not above 0.
    """
    if not (from_rate > 0 and to_rate > 0):
        raise ValueError(f"cannot resample from {from_rate} Hz to {to_rate} Hz: a rate is above 0")
    if from_rate == to_rate or not len(samples):
        return samples
    length = max(1, round(len(samples) * to_rate / from_rate))
    positions = np.arange(length) * (from_rate / to_rate)
    changed: Samples = np.interp(positions, np.arange(len(samples)), samples).astype(np.float32)
    return changed


PCM, IEEE_FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MIN_RATE, MAX_RATE = 4_000, 384_000


class AudioError(ValueError):
    """The bytes are not readable audio; the message has their format and the supported ones."""


@dataclass(frozen=True, slots=True)
class _Format:
    code: int
    channels: int
    rate: int
    block_bytes: int
    bits: int


def encode_pcm16(samples: Samples) -> bytes:
    """Return little-endian int16: clipped to -1 and 1, times 32767, rounded toward zero."""
    finite = np.nan_to_num(np.asarray(samples, np.float32), nan=0.0)
    return (np.clip(finite, -1.0, 1.0) * np.float32(32767.0)).astype("<i2").tobytes()


def encode_wav(samples: Samples, rate: int) -> bytes:
    """Return a whole mono 16-bit file with the plain header of 44 bytes."""
    data = encode_pcm16(samples)
    head = struct.pack("<4sI8s", b"RIFF", 36 + len(data), b"WAVEfmt ")
    head += struct.pack("<IHHIIHH", 16, PCM, 1, rate, rate * 2, 2, 16)
    return head + struct.pack("<4sI", b"data", len(data)) + data


def decode_audio(data: bytes) -> tuple[Samples, int]:
    """Return the file's samples, channels mixed down to one, and its rate in Hz.

    Raises AudioError unless it is a complete, uncompressed WAV file.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise AudioError(f"the audio {_kind_of(data)}; {SUPPORTED}")
    audio_format, body = _chunks(data)
    frames = len(body) // audio_format.block_bytes
    if not frames:
        raise AudioError("the WAV file has no samples")
    body = body[: frames * audio_format.block_bytes]
    if audio_format.code == IEEE_FLOAT:
        samples = _floats(body)
    else:
        samples = _integers(body, audio_format.bits)
    if audio_format.channels > 1:
        samples = samples.reshape(-1, audio_format.channels).mean(axis=1, dtype=np.float32)
    return samples, audio_format.rate


def _kind_of(data: bytes) -> str:
    if not data:
        return "is empty"
    for start, offset, name in _MAGIC:
        if data[offset : offset + len(start)] == start:
            return f"is {name}, which cannot be read here"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        layer = data[1] & 0x06  # 0 only in AAC's framing; the sync words are equal
        return f"is {'MP3' if layer else 'AAC'}, which cannot be read here"
    return f"is not a WAV file (it begins with {data[:4]!r})"


def _chunks(data: bytes) -> tuple[_Format, bytes]:
    """Return the format and the samples; skips other chunks after the first 12 bytes."""
    audio_format: _Format | None = None
    offset = 12
    while offset + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, offset)
        offset += 8
        chunk = data[offset : offset + size]
        if name == b"data":
            if audio_format is None:
                raise AudioError("the WAV file has no fmt chunk before its samples")
            if len(chunk) < size < UNKNOWN_SIZE:
                raise AudioError(
                    f"the WAV file is truncated: it has {len(chunk)} of {size} bytes of samples"
                )
            return audio_format, chunk
        if len(chunk) < size:
            break
        if name == b"fmt ":
            audio_format = _read_format(chunk)
        offset += size + size % 2
    raise AudioError("the WAV file is truncated: it ends before its samples (no data chunk)")


def _read_format(chunk: bytes) -> _Format:
    if len(chunk) < 16:
        raise AudioError(f"the WAV file's fmt chunk has {len(chunk)} bytes instead of 16 or more")
    code, channels, rate, _, block_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if code == EXTENSIBLE:
        if len(chunk) < 40 or chunk[26:40] != SUBFORMAT_TAIL:
            raise AudioError(f"the WAV file's extensible format is unknown; {SUPPORTED}")
        code = int.from_bytes(chunk[24:26], "little")
    if code not in (PCM, IEEE_FLOAT):
        raise AudioError(
            f"the WAV file contains {OTHER_CODECS.get(code, f'codec {code}')}; {SUPPORTED}"
        )
    if bits not in ((32,) if code == IEEE_FLOAT else FULL_SCALE):
        kind = "float" if code == IEEE_FLOAT else "PCM"
        raise AudioError(f"the WAV file has {bits} bit {kind} samples; {SUPPORTED}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(f"the WAV file declares {channels} channels; {SUPPORTED}")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(f"the WAV file has {rate} samples/s, outside {MIN_RATE} to {MAX_RATE}")
    if block_bytes != channels * bits // 8:
        raise AudioError(
            f"the WAV file is inconsistent: {channels} channels of {bits} bits in "
            f"{block_bytes} bytes"
        )
    return _Format(code, channels, rate, block_bytes, bits)


def _floats(body: bytes) -> Samples:
    samples = np.frombuffer(body, "<f4").astype(np.float32)
    if not np.isfinite(samples).all():
        raise AudioError("the WAV file has samples that are not finite")
    return samples


def _integers(body: bytes, bits: int) -> Samples:
    if bits == 8:  # the only unsigned width
        whole = np.frombuffer(body, np.uint8).astype(np.int32) - FULL_SCALE[8]
    elif bits == 24:
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        whole = wide.reshape(-1).view("<i4")
    else:
        whole = np.frombuffer(body, f"<i{bits // 8}")
    return (whole / np.float32(FULL_SCALE[bits])).astype(np.float32)
