"""Discovery: turns pods and DNS answers of `[[discover]]` sources into workers. Pure."""
