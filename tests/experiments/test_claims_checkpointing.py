import pytest
from helpers import quick_compile  # noqa: F401

from experiments._claims_checkpointing import POLICIES, gradient_step


@pytest.mark.slow
def test_every_policy_is_measured_and_those_that_compute_again_hold_less():
    mib = {}
    for remat, scan in POLICIES:
        mib[remat, scan], seconds = gradient_step(4, 256, remat, scan, 1)
        assert seconds > 0
    assert mib["block", True] < mib["dots", True] < mib["none", True]
