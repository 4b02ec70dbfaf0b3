"""Transfer of tensors through a process group: backends, receives, sends, memory and files.

`backend` joins a gloo or NCCL group; `receive` receives one plan and detects missing bytes;
`transfer` is the state of a running receive or send; `buffers` and `mapped_file` are the memory for
received bytes; `tensor_hashing` computes digests, also while bytes arrive.
"""
