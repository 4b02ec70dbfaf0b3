"""The cost of a cluster and how even its load is: several proxies, their workers and one store."""
