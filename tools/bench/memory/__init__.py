"""The memory of connections and waiting requests."""
