"""Speech sessions over WebSocket: connecting to a worker, and the relay."""
