"""Scanners that search the bytes of a message without a parser, in Python or natively."""
