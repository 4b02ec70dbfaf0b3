"""Admission: the limits of requests, the queue, and the gate during weight updates."""
