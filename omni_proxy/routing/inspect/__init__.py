"""Reading a request for routing: its requirements, model, affinity key and prefix. Pure."""
