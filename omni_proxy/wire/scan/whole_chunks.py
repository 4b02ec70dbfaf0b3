"""Checks whether a piece of a chunked body consists of whole chunks, none of them the last one.

The check itself is in the native build's `whole_chunks.pyx`, which replaces this file; in Python,
llhttp is faster. Invariant: llhttp, between two chunks, would accept such a piece and be between
two chunks again after it, so the piece need not be fed to it.
"""

from __future__ import annotations

from typing import Final

READS_CHUNKS: Final = False


def are_whole_chunks(piece: bytes) -> bool:
    """False if `piece` is anything else, and always in Python."""
    return False
