"""The version store: received weight versions on disk and in shared memory.

`service` runs the store in the proxy; `version_store` has its state and operations; `draft` is a
version that is being received; `recovery` checks the files of earlier runs; `manifest` has the
formats, and compares workers' checksums with a stored version; `filesystem` has file operations.
"""
