"""System resources: files, memory, TLS contexts, descriptors, systemd, garbage collection."""
