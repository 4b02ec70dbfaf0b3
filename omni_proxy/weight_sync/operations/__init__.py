"""Weight operations: queue, runner, rollback, version probes and status.

`weight_operations` is the entry point that the admin API calls."""
