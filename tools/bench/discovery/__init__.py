"""The cost of discovery for the event loop."""
