"""Audio as arrays of float32 samples within -1 and 1: WAV decoding and encoding, resampling.

It knows neither models nor requests.
"""
