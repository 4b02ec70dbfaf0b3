"""One request and its response: steps, fast path, body, response relay, access log."""
