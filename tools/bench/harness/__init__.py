"""Shared by all measurements: builds, processes, sides, rounds of legs, tables and charts."""
