"""Replicas that the proxy starts itself: commands, child processes, GPUs, start-up progress."""
