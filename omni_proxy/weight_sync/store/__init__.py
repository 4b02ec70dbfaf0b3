"""The version store: received weight versions on disk and in shared memory.

`service` runs the store inside the program; `version_store` is its state and operations; `draft` is
a version that is being received; `recovery` checks what an earlier run left; `manifest` has the
formats, and compares workers' checksums with a stored version; `filesystem` has the folders.
"""
