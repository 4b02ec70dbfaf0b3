"""Which bucket of a histogram a value belongs to. The native build has `bucket_index.pyx` in its
place, which compares numbers and no objects."""

from bisect import bisect_left as bucket_of

__all__ = ("bucket_of",)
