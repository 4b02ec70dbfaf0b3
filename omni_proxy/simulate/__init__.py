"""`omni-proxy simulate`: compares policies on a workload in virtual time, without sockets."""
