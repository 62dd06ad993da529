"""What drafters have in common that change another one's ways, not its shape."""

from dataclasses import dataclass

from specdec_jax.base import Drafter


@dataclass(frozen=True)
class Around:
    """What a drafter around another drafter takes over from it: its shape."""

    drafter: Drafter

    @property
    def num_nodes(self) -> int:
        """The other's."""
        return self.drafter.num_nodes

    @property
    def depth(self) -> int:
        """The other's."""
        return self.drafter.depth

    @property
    def siblings(self) -> str:
        """The other's."""
        return self.drafter.siblings

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The other's."""
        return self.drafter.hidden_layers
