"""All products in f32 are exact, on GPUs, too."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _exact_products(exact_products):
    """The oracle's are."""
