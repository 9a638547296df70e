import math

from sao_jax.report.tokens import token_strip


def test_colours_are_by_sign_and_magnitude_and_text_is_escaped():
    page = token_strip(["<", "b", "\n", "c"], [1.0, -2.0, 9.0, math.nan], [1, 1, 0, 1], title="a & b")
    assert "&lt;" in page
    assert "a &amp; b" in page
    assert "rgba(37,99,235,0.38)" in page, "half of the largest magnitude at an action token"
    assert "rgba(209,52,75,0.75)" in page
    assert "⏎" in page
    assert page.count("title=") == 3
    assert "0.00)" in page, "a number that is not finite has no colour"


def test_a_strip_of_nothing_is_empty():
    assert "<span" not in token_strip([], [], [])
