"""`omni-proxy bench`: measures a running server from the client's side."""
