"""Traces of exchanges: W3C context to the workers, and records of spans for the exporter."""
