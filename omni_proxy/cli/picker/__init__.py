"""`omni-proxy picker`."""
