"""The I/O of a cluster: the connection to the store, and the service that keeps this proxy a
member. `cluster` is what it knows."""
