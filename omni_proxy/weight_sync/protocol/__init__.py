"""Weight sync without I/O: states, requests, replies, rank layout and journal records."""
