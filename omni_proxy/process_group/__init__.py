"""Trainers' process groups that this process joins as a rank: join, receive, send, leave.

Shared by the replica and the proxy. It has no HTTP, no model and no fleet. Importing it does not
import torch; joining a group does. `receiver` and `sender` are the entry points; `rank_protocol`
is the protocol of one rank, `fork` runs it in child processes, `broadcast` transfers the tensors.
"""
