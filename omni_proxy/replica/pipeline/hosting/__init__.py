"""Package hosting."""
