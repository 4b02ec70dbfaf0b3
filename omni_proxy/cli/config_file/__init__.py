"""Commands about the configuration file: `init` writes one, `check` validates one, and `schema`
describes all its keys.
"""
