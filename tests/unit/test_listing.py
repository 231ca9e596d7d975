"""The list of a checkpoint's files, as rank 0 sends it to the other ranks."""

from __future__ import annotations

import pytest

from ds_frozen_patch.load.listing import Listing, Saved

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


def of_ranks(count: int, prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(count))


NAMES = [(), ("mp_rank_00_model_states.pt",), of_ranks(1), of_ranks(12, "bf16_"), (*of_ranks(2), *of_ranks(3, "x")[2:])]


@pytest.mark.parametrize("names", NAMES)
def test_it_arrives_as_it_was_sent(names: tuple[str, ...]) -> None:
    listing = Listing("checkpoint", of_ranks(2), names, Saved(2, 3, True))
    assert Listing.from_bytes(listing.to_bytes()) == listing


def test_its_size_does_not_depend_on_the_number_of_ranks() -> None:
    sizes = [len(Listing("checkpoint", of_ranks(ranks), of_ranks(ranks)).to_bytes()) for ranks in (10, 9000)]
    assert sizes[1] <= sizes[0] + 10
