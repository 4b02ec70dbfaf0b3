"""Replicas that the proxy starts itself: argv, child processes, GPUs, start-up progress."""
