"""The safetensors format, as the proxy writes it and the replica reads it."""

from __future__ import annotations

from typing import Final

# Names in a header, and torch's names without "torch.".
TORCH_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
MAX_HEADER_BYTES: Final = 100_000_000  # limit of the format, which readers enforce
INDEX_FILE: Final = "model.safetensors.index.json"  # names the file of each tensor
