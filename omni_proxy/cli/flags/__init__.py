"""Package flags."""
