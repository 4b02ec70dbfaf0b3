"""Package head_caching."""
