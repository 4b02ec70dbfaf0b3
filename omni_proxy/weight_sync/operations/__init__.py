"""Weight operations: the queue, the runner, roll back, the state journal, calls to workers."""
