"""Models: weights, forward passes, tokenizers and chat templates, without pipelines or requests."""
