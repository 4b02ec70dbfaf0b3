"""Downstream connections."""
