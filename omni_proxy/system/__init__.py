"""System resources: files, memory, TLS contexts, descriptor limit, systemd, garbage collection."""
