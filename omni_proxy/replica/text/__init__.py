"""The text stage: continuous batching, many requests computed together one forward pass at a time.

It uses a model only through `ModelWorker`, and other stages only through messages.
"""
