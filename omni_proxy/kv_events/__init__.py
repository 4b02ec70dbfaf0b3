"""Follows the KV events of engines: a child process subscribes and decodes them.

The service in the main process manages its subscriptions, and forwards the changes."""
