"""All tests of this folder run under JAX's strict promotion rules, which a caller may have set."""

import pytest

from tests.support.promotion import strict_promotion


@pytest.fixture(autouse=True)
def _strict_promotion():
    with strict_promotion():
        yield
