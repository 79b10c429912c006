"Every test of this chapter begins with the same random numbers, on one thread."

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
