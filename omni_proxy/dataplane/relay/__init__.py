"""Bodies: of requests to the worker, of responses to the client, and local replies."""
