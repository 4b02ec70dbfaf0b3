"""Package whisper."""
