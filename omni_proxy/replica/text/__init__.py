"""What the text stage runs: continuous batching, many requests in one forward pass.

It uses a model only through `ModelWorker`, and other stages only through messages. `stages.text`
builds the stage.
"""
