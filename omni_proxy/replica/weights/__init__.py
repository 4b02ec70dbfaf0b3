"""Weight updates of a serving model, and checksums of its weights.

Invariant: new weights are validated completely before a live tensor is touched, and then replace
all live ones or none. The text stage's scheduler decides when.
"""
