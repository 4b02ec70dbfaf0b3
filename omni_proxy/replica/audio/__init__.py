"""Sound as arrays of float32 samples within -1 and 1: read from files, written to files, resampled.

It knows neither models nor requests.
"""
