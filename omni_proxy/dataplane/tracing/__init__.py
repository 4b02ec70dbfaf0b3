"""Traces of exchanges: W3C trace context for workers, and span records for the exporter."""
