"""Terminal output of commands: text tables, the feed's types, diagnoses."""
