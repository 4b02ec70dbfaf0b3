"""The cost of the data plane: time, memory and instructions of requests, events and connections."""
