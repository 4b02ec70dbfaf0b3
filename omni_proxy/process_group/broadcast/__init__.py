"""Moving tensors through a process group: backends, one receive, transfers, memory and files.

`backend` joins a gloo or NCCL group; `receive` takes in one plan and detects missing bytes;
`transfer` is the state of a running receive or send; `buffers` and `mapped_file` are the memory
that bytes land in; `tensor_hashing` computes digests while bytes arrive.
"""
