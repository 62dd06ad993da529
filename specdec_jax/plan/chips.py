"""What a chip has, from its maker's tables."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One chip; bytes and seconds."""

    hbm_bytes: float
    hbm_bandwidth: float
    """Bytes a second from main memory."""
    flops: float
    """bfloat16 operations a second."""
    link_bandwidth: float
    """Bytes a second to the other chips, one way: half of the figure both ways."""


CHIPS = {
    "v5e": Chip(16e9, 819e9, 197e12, 200e9),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 600e9),
    "v6e": Chip(32e9, 1638e9, 918e12, 400e9),
}
"""Source: docs.cloud.google.com/tpu/docs/v5e, /v5p-training and /v6e (2026)."""


def find_chip(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5e:2x4".

    Raises:
      ValueError: There are no figures for it.

    Example:
      >>> find_chip("v5e:2x4").hbm_bandwidth
      819000000000.0
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(
            f"topology {topology!r}: there are no figures for {kind!r}; known are "
            f"{', '.join(CHIPS)}, written as v5e:2x4"
        )
    return CHIPS[kind]
