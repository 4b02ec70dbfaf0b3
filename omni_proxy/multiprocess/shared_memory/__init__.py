"""Counts and sessions in memory that all processes map: without locks, a writer for each cell."""
