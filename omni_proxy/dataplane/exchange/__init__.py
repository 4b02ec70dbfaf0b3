"""One request and its response: pipeline, fast path, body, response relay, access log."""
