"""Parts of weight operations: the queue, the runner, rollback and version probes."""
