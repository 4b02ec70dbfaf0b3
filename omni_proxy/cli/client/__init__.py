"""Package client."""
