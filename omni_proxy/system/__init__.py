"""System resources: files, TLS contexts, descriptor limit, systemd, garbage collection."""
