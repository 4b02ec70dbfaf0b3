"""The running configuration: store, reload, state file, membership lock, worker drain."""
