"""One thread for torch: its threads wait by spinning, and beside any other busy process every
operation then takes a hundred times as long."""

import torch

torch.set_num_threads(1)
