"""The replica: a real inference server behind the same HTTP surface as the workers of others.

It knows nothing of the proxy, and the proxy knows it only as a command that it starts.
"""
