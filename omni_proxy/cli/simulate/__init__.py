"""`omni-proxy simulate`: policies compared on a workload in virtual time."""
