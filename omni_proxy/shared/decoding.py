"""What decoding the bytes of another program raises, JSON and MessagePack."""

from __future__ import annotations

from typing import Final

import msgspec

# Too many levels are an error, too, even of fields that the type does not have.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
