"""The configuration: one TOML file, what HTTP changed since, and the flags of the command line.

Pure: text in, values or problems out. Nothing here opens a file, reads the environment or the
clock; a text that is refused changes nothing.
"""
