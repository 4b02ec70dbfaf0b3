"""What the proxy and the replica share: each module is one rule that both follow."""
