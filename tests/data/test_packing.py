"""Pieces share rows without overlap, in the order of their coming, and never need more windows than there are."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.data.packing import Packing, first_fit, pieces_of

CAPACITY = 12


def packing_of(devices, rows, slots, pieces=4):
    return Packing(devices, rows, slots, CAPACITY, pieces)


def by_row(packing, lengths):
    """{(window, device, row): numbers of its pieces in order}."""
    found = {}
    for n, place in enumerate(packing.places):
        found.setdefault(place[:3], []).append(n)
    assert len(packing.places) == len(lengths)
    return found


cases = st.fixed_dictionaries(
    dict(
        devices=st.integers(1, 3),
        rows=st.integers(1, 3),
        pieces=st.integers(2, 4),
        lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=24),
    )
)


def packed(devices, rows, pieces, lengths):
    slots = rows * math.ceil(math.ceil(len(lengths) / devices) / rows)
    packing = packing_of(devices, rows, slots, pieces)
    for length in lengths:
        packing.add(length)
    return packing


@given(cases)
@settings(max_examples=60, deadline=None)
def test_rows_hold_what_fits_them_and_every_piece_has_a_slot_of_its_own(case):
    packing, lengths = packed(**case), case["lengths"]
    for (window, device, row), numbers in by_row(packing, lengths).items():
        assert sum(lengths[n] for n in numbers) <= CAPACITY
        assert len(numbers) <= case["pieces"]
        assert device < case["devices"]
        assert row < case["rows"]
        assert window < packing.slots // case["rows"]  # no more windows than the unpacked batch has
    slots = [(p.device, p.slot) for p in packing.places]
    assert len(set(slots)) == len(slots)
    assert all(slot < packing.slots for _, slot in slots)


@given(cases)
@settings(max_examples=60, deadline=None)
def test_windows_come_in_order_and_are_left_only_when_a_piece_fits_no_row(case):
    packing, lengths = packed(**case), case["lengths"]
    windows = [p.window for p in packing.places]
    assert windows[0] == 0
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(windows))
    assert [packing.pieces_in(w) for w in range(windows[-1] + 1)] == [
        range(windows.index(w), windows.index(w) + windows.count(w)) for w in range(windows[-1] + 1)
    ]
    for n in range(1, len(lengths)):
        before = packed(**case | dict(lengths=lengths[:n])) if case["devices"] == 1 else None
        if before is None or windows[n] == windows[n - 1]:
            continue
        rows = [m for key, m in by_row(before, lengths[:n]).items() if key[0] == windows[n - 1]]
        assert len(rows) == case["rows"]
        for row in rows:
            assert len(row) == case["pieces"] or sum(lengths[m] for m in row) + lengths[n] > CAPACITY


@given(cases)
@settings(max_examples=30, deadline=None)
def test_places_depend_on_the_lengths_so_far_alone(case):
    packing, lengths = packed(**case), case["lengths"]
    again = packing_of(packing.devices, packing.rows, packing.slots, packing.pieces)
    for n, length in enumerate(lengths):
        opens = again.closes_window([length])
        assert again.add(length) == packing.places[n]
        assert opens == (n > 0 and packing.places[n].window > packing.places[n - 1].window)
    again.clear()
    assert [again.add(length) for length in lengths] == packing.places


def test_places_worked_by_hand():
    packing = packing_of(devices=2, rows=1, slots=4)
    places = [tuple(packing.add(length)) for length in (8, 5, 4, 7, 1, 12)]
    # Rows of 12 on devices 0 and 1: 8 + 4 and 5 + 7 fill them; the piece of 1 opens the next window, 12 its second row.
    assert places == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (0, 1, 0, 1), (1, 0, 0, 2), (1, 1, 0, 2)]


def test_a_device_without_slots_gets_no_more_pieces():
    packing = packing_of(devices=2, rows=1, slots=2)
    assert [tuple(packing.add(1)) for _ in range(4)] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1)]
    with pytest.raises(ValueError, match="all 4 slots are taken"):
        packing.add(1)


def test_the_first_row_with_room_is_taken():
    assert first_fit([[9], [4, 4], []], 4, capacity=12, pieces=3) == 1
    assert first_fit([[9], [4, 4], []], 4, capacity=12, pieces=2) == 2
    assert first_fit([[9], [9]], 4, capacity=12, pieces=3) is None


def test_a_piece_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="13 tokens does not fit a row of 12"):
        packing_of(1, 1, 2).add(CAPACITY + 1)


def test_long_rows_hold_more_pieces_up_to_a_limit():
    assert [pieces_of(length) for length in (8, 96, 256, 10**5)] == [2, 12, 32, 32]
