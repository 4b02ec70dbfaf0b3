"""`omni-proxy weights`: the weights of the workers, and operations on them."""
