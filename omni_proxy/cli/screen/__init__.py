"""How commands show things: text tables, the feed, diagnoses, the access log."""
