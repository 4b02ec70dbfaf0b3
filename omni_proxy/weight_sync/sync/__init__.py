"""A weight sync with a trainer's group: endpoint, steps, commit, verification and lifecycle."""
