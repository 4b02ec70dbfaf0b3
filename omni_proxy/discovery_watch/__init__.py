"""Watches the sources of `[[discover]]`: the Kubernetes API and DNS; brings workers in and out."""
