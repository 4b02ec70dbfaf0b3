"""Caches of parsed heads: requests and responses that differ in few values from earlier ones.
Pure."""
