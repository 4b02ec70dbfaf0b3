"""Operations on many workers, as values and state machines: who is meant, what an answer means.

Invariant: nothing here waits, calls or knows the time; whoever does brings it in. What a failed
operation leaves behind is decided here alone, so that it can be read in one place.
"""
