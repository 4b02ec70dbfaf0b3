"""Errors of a KV transfer, and how they appear in responses."""

from __future__ import annotations

# Prefix of every error of a transfer, named as in SGLang: routers look for it.
KV_ERROR = "KVTransferError"


class TransferFailed(Exception):
    """A transfer failed; the message is the one for the client, without the prefix."""


class ConnectionEnded(TransferFailed):
    """The peer closed the connection, or the connection was lost."""
