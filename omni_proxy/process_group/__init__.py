"""Process groups of trainers that this process is a rank of: join, receive, send, leave in time.

Shared by the replica and the proxy. It has no HTTP, no model and no fleet. Importing it does not
import torch: that happens when a group is joined. `receiver` and `sender` are the entry points;
`trainer_group` is the protocol, `fork` runs it in child processes, `broadcast` moves the tensors.
"""
