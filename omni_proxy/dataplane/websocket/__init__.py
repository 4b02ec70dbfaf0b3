"""The WebSocket relay."""
