"""Admission: limits on requests, the queue, and the gate during weight updates."""
