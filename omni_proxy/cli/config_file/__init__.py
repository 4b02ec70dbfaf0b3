"""Commands about the configuration file: `init` writes one, `keys` makes the keys of callers, and
`schema` describes all its keys."""
