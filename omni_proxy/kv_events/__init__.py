"""Follows the KV events of engines: a child process subscribes and decodes, the service in the main
process keeps its subscriptions and passes on what it says."""
