"""Shell completion: the scripts, and the worker names that they ask for."""
