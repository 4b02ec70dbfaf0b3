"""The tables of the configuration: their keys, and the rules between the keys of a table."""
