"""Speech synthesis over HTTP and WebSocket, batches of it, and uploaded voices."""
