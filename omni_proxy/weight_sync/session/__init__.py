"""One weight sync session with a trainer: endpoint, lifecycle, steps, commit, verification."""
