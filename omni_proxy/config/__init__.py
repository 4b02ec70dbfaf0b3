"""The configuration: one TOML file, changes made over HTTP, and command-line flags.

Pure: text in, values or problems out. Nothing here opens a file or reads the environment or the
clock. A text that is refused changes nothing.
"""
