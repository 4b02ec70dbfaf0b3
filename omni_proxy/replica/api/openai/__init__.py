"""Package openai."""
