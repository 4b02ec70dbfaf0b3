"""What runs the steps of an exchange: a coroutine, or the event loop directly (fast path)."""
