"""One weight sync with a trainer's group: endpoint, steps, commit, delivery of a round,
verification, and the lifecycle with its watchdog."""
