"""A simple writer of GGUF files, independent of the reader."""

import struct

STRING, ARRAY, U32, F32_VALUE, BOOL, U64 = 8, 9, 4, 6, 7, 10
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def pair(key: str, value) -> bytes:
    return text(key) + typed(value)


def typed(value) -> bytes:
    if isinstance(value, list):
        kind, joined = element(value[0]) if value else (U32, b"")
        joined = b"".join(element(item)[1] for item in value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + joined
    kind, packed = element(value)
    return struct.pack("<I", kind) + packed


def element(value) -> tuple[int, bytes]:
    match value:
        case bool():
            return BOOL, struct.pack("<?", value)
        case int():
            return U32, struct.pack("<I", value)
        case float():
            return F32_VALUE, struct.pack("<f", value)
        case str():
            return STRING, text(value)
        case _:
            raise TypeError(value)


def gguf(metadata=(), tensors=(), alignment=32) -> bytes:
    """`metadata`: {key: value}; `tensors`: (name, dims innermost first, type, packed bytes)."""
    metadata = dict(metadata)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items())
    content = b""
    for name, dims, kind, packed in tensors:
        content += bytes(-len(content) % alignment)
        head += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", kind, len(content))
        content += packed
    return head + bytes(-len(head) % alignment) + content


def floats(values) -> bytes:
    values = list(values)
    return struct.pack(f"<{len(values)}f", *values)


def single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
