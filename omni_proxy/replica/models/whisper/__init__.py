"""Whisper transcription: mel spectra, network, model file, decoding."""
