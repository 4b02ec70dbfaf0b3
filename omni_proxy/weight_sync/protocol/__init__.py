"""The pure part of weight sync: states, requests, replies, rank layout, journal records. No I/O."""
