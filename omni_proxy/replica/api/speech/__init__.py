"""Package speech."""
