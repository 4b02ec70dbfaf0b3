"""Weight operations: queue, runner, rollback, version probes, status. `weight_operations` is the
entry point that the admin API calls."""
