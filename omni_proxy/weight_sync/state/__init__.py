"""Durable state of weight updates: the journal file, uncertain and paused workers, the epoch."""
