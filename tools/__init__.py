"""Tools for people who work on omni-proxy; nothing here is part of what is installed."""
