"""Package screen."""
