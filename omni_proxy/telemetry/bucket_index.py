"""Finds the histogram bucket of a value. The native build uses `bucket_index.pyx` instead, which
compares C doubles rather than Python objects."""

from bisect import bisect_left as bucket_of

__all__ = ("bucket_of",)
