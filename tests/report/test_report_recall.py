import pytest

from sao_jax.report.intervals import wilson
from sao_jax.report.recall import recall_by_distance, recall_table


def test_counts_add_up_over_trajectories_by_distance():
    parts = [
        {"asked_k2": 2.0, "recalled_k2": 2.0, "asked_k16": 1.0, "recalled_k16": 0.0, "goal": 1.0},
        {"asked_k2": 2.0, "recalled_k2": 1.0, "asked_k4": 0.0},
        {"visible": 1.0},
    ]
    found = recall_by_distance(parts)
    assert list(found) == [2, 16]
    assert found[2] == dict(asked=4.0, recalled=3.0, share=0.75, low=wilson(3, 4)[0], high=wilson(3, 4)[1])
    assert (found[16]["asked"], found[16]["share"]) == (1.0, 0.0)


def test_trajectories_that_were_asked_nothing_give_nothing():
    assert recall_by_distance([{}, {"recalled_k2": 1.0}, {"asked_kx": 1.0}]) == {}


def test_the_table_names_the_ranges_of_distances():
    parts = [{"asked_k2": 1.0, "recalled_k2": 1.0, "asked_k4": 2.0, "recalled_k4": 1.0}]
    table = recall_table(recall_by_distance(parts), "a run")
    assert [list(column.cells) for column in table.columns][:3] == [
        ["1 to 2", "3 to 4"],
        ["1", "2"],
        ["100.0%", "50.0%"],
    ]


def test_more_recalled_than_asked_is_refused():
    with pytest.raises(ValueError, match="successes"):
        recall_by_distance([{"asked_k2": 1.0, "recalled_k2": 2.0}])
