"""What discovery costs the event loop."""
