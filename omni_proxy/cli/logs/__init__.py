"""The commands that read the logs of a proxy: `logs` and `trace`."""
