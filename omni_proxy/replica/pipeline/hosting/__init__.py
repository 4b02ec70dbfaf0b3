"""Runs stages in threads and child processes, restarts and stops them."""
