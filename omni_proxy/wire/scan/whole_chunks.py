"""Whether a piece of a chunked body is whole chunks, none of them the last one.

Here for the native build, whose `whole_chunks.pyx` stands in the place of this file: for Python
llhttp is faster. Invariant: llhttp accepts such a piece between two chunks, and is between two
chunks again behind it, so it need not see it.
"""

from __future__ import annotations

from typing import Final

READS_CHUNKS: Final = False


def are_whole_chunks(piece: bytes) -> bool:
    """False where that was not found."""
    return False
