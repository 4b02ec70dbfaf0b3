"""The version store: weight versions kept on tmpfs or disk, with a manifest and recovery."""
