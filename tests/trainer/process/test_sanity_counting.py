"""Promise: refused steps are counted as long as no good one comes between them."""

from __future__ import annotations

from tiercheck.trainer.save.sanity import Sanity


def test_a_good_step_ends_the_row() -> None:
    sanity = Sanity()
    for step in (3, 4, 5):
        sanity.refused(step)
    assert sanity.in_a_row == 3
    sanity.good(6)
    assert sanity.in_a_row == 0


def test_steps_that_nobody_looked_at_do_not_end_it() -> None:
    sanity = Sanity()
    sanity.refused(4)
    sanity.refused(8)  # a state that is not finite does not heal
    assert sanity.in_a_row == 5


def test_a_step_counts_once_and_a_good_gradient_does_not_outweigh_its_loss() -> None:
    sanity = Sanity()
    sanity.refused(3)
    sanity.refused(3)
    sanity.good(3)
    sanity.good(2)
    assert sanity.in_a_row == 1
