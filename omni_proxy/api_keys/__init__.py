"""API keys of callers: hashes, look-up of the caller by key, permissions and limits. Pure."""
