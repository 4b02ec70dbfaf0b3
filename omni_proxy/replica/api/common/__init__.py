"""Helpers for routes: errors, body validation, SSE and deferred streams, media, origin checks."""
