"""Tables of the configuration that have a module of their own: their keys and their rules."""
