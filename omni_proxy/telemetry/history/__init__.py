"""Time series of the last hours of the fleet and of each worker, for charts."""
