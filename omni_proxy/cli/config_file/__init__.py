"""Commands about the configuration file: `init` writes one, `schema` describes all its keys."""
