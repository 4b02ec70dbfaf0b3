"""What the program says of itself: its own log, and best-effort lines such as the access log.

Invariant: nothing here may fail, delay or fill the memory of a request.
"""
