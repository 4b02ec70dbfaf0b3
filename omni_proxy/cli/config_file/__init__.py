"""Commands about the configuration file: `init` writes one, and `schema` describes all its keys."""
