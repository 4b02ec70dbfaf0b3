"""The version store: received weight versions on disk and in shared memory.

`service` runs the store inside the program; `version_store` is its state and operations; `draft` is
a version that is being received; `recovery` checks what an earlier run left; `manifest`,
`safetensors_header` are the formats; `filesystem`, `shm_cleanup` the folders; `worker_proof`
compares workers' checksums with a stored version.
"""
