"""Every test starts from the same seed, on the same number of threads."""

import pytest
import torch

pytest_plugins = ["tests.site_fixtures"]


def pytest_configure() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
