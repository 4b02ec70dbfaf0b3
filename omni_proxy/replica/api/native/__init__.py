"""Package native."""
