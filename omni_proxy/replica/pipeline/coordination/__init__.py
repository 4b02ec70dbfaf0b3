"""Package coordination."""
