"""Rolling updates of a serving fleet, a few workers at a time, from disk or from the store."""
