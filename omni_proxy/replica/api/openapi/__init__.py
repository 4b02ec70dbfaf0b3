"""The OpenAPI document of this server and the page that renders it."""
