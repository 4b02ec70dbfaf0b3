"""Configuration tables with a module each: their keys and the rules between their keys."""
