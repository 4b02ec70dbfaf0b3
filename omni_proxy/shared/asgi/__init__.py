"""Rules of the Quart apps and their Hypercorn servers, in the proxy and in the replica."""
