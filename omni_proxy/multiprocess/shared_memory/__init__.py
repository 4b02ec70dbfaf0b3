"""Counters and sessions in memory that all processes map, without locks."""
