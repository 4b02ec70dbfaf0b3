"""The picker: chooses workers for requests that Envoy or another program carries itself."""
