"""`omni-proxy bench`: a running server measured as its clients see it."""
