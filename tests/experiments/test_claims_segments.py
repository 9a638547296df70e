import pytest
from helpers import quick_compile  # noqa: F401

from experiments import _claims_segments as claim


@pytest.mark.parametrize("layout", claim.LAYOUTS)
def test_every_layout_stores_and_reads_each_token_once(layout):
    figures = claim.in_this_process(layout, 250)  # two and a half segments
    assert 21 < figures["bytes_per_token"] < 23


def test_a_process_of_its_own_is_measured():
    assert claim.host("segments", 100)["bytes_per_token"] > 21
    with pytest.raises(ValueError, match="group of 0 steps: "):
        claim.host("group", 0)


def test_a_gradient_of_more_rows_is_counted_with_more_memory():
    one, two = claim.Step(1, 48, 16), claim.Step(2, 48, 16)
    assert one.mib() < two.mib()
    assert one.seconds(1) > 0
