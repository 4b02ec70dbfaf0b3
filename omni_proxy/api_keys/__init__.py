"""API keys of callers: their hashes, whose a presented key is, and what it may do. Pure."""
