"""New weights for a model that serves, and proof of which weights it has.

Invariant: whatever is sent is checked whole before a live tensor is touched, and then takes their
place all at once or not at all. Nothing here decides when: the text stage's scheduler does.
"""
