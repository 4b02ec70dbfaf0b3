"""The configuration: one TOML file, what HTTP changed since, and the flags of the command line.

PURE: text in, values or problems out. Nothing here opens a file, reads the environment or asks
for the time; a refused text changes nothing.
"""
