"""A spec of a fork's own, which notes what it was used for."""

from __future__ import annotations

from pathlib import Path

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args


class LayerOfFork(TransformerLayer):
    """A layer that writes down, in the fork's `--notes` folder, that it was built and has run."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._note("built")

    def forward(self, *args, **kwargs):
        """As the layer of Megatron."""
        if self.training:
            self._note("trained")
        return super().forward(*args, **kwargs)

    def _note(self, event: str) -> None:
        args = get_args()
        folder = Path(args.notes)
        (folder / f"{event}.rank{args.rank}.layer{self.layer_number}").touch()


layer_of_fork = ModuleSpec(
    module=LayerOfFork,
    submodules=get_gpt_layer_local_submodules(normalization="RMSNorm"),
)
