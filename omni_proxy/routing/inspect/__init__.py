"""Inspection of requests for routing: requirements, model, affinity key and prefix. Pure."""
