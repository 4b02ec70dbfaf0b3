"""Admission: limits, the queue, the gate during weight updates."""
