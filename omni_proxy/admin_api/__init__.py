"""The front: everything over HTTP that is not model traffic, a Quart-trio app behind the door.

Invariant: only the door reaches it, over a private Unix socket, with heads it has judged and bodies
it has bounded. It reads the fleet and asks the keeper for changes; it edits no configuration.
"""
