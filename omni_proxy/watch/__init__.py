"""What watches the world: probes, the configuration file, and the replicas we started.

Invariant: this room brings facts to the fleet and never decides where a request goes.
"""
