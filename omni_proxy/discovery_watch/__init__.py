"""Watches the sources of `[[discover]]`, the Kubernetes API and DNS; adds and removes workers."""
