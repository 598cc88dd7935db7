"""The option `--placement`: which of the client's policies chooses bookies."""

import enum
from typing import Annotated

import typer

from client_aio import PlacementPolicy, RackAware, WeightedRandom


class Placement(enum.StrEnum):
    """The policies that can be named on the command line."""

    WEIGHTED = "weighted"
    RACK_AWARE = "rack-aware"

    @property
    def policy(self) -> PlacementPolicy:
        """Give the policy of that name."""
        return RackAware() if self is Placement.RACK_AWARE else WeightedRandom()


PlacementOption = Annotated[
    Placement,
    typer.Option(
        "--placement",
        envvar="BOOKIE_AIO_PLACEMENT",
        help="How bookies are chosen: by weight, or so that each entry's copies span two racks.",
    ),
]
