"""Operating system resources: TLS contexts, descriptor limit, runtime directory, stderr."""
