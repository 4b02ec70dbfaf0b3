"""What a cluster costs and how even its load is: several proxies, their workers and one store."""
