"""Envoy's external processor, as an endpoint picker of the Gateway API inference extension."""
