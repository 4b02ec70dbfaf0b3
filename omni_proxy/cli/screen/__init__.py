"""Terminal output that several commands share: the table of workers, diagnoses."""
