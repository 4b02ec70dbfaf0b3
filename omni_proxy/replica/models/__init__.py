"""Models: weights, forward passes and text codecs. They know nothing of pipelines or requests."""
