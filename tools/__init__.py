"""Tools for developers of omni-proxy; not part of the installed package."""
