"""Package openapi."""
