"""Process groups that a trainer owns and we are ranks of: meeting, receiving, ending in time.

Shared by the replica and the proxy. Knows no HTTP, no model and no fleet. Importing it imports no
torch: that happens where a group is joined.
"""
