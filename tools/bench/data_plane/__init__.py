"""What the data plane costs: time, memory and instructions of requests, events and connections."""
