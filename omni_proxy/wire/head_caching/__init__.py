"""Caches of parsed heads, for requests and responses that differ from earlier ones in few values.
Pure."""
