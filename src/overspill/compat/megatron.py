"""Megatron Bridge's `cpu_offloading_*` options, for any model. All of them do what they say."""

from dataclasses import dataclass

from torch import nn

from overspill.api import offload_training
from overspill.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class CpuOffloading:
    """The options by their names in Megatron Bridge's model configurations, with its defaults and checks.

    `overspill.restore(model)` ends it. Where Megatron ignores an option that has no effect, this raises.

    Raises:
        PlanError: A negative number of layers, nothing to offload, or an option that has no effect.

    Example:
        from overspill.compat.megatron import CpuOffloading

        options = CpuOffloading(cpu_offloading=True, cpu_offloading_num_layers=2, cpu_offloading_weights=True)
        model = options.apply(LlamaForCausalLM(config))
    """

    cpu_offloading: bool = False
    """Whether anything is done at all."""
    cpu_offloading_num_layers: int = 0
    """How many layers, from the first: 0 up to all but the last."""
    cpu_offloading_activations: bool = True
    """What these layers save for backward is in host memory meanwhile."""
    cpu_offloading_weights: bool = False
    """Their weights and gradients are in host memory, and come for forward and backward."""
    cpu_offloading_double_buffering: bool = False
    """Twice the memory for what is on its way, so that copies go on while layers compute."""

    def __post_init__(self) -> None:
        if self.cpu_offloading_num_layers < 0:
            raise PlanError(
                f"cpu_offloading_num_layers={self.cpu_offloading_num_layers} is negative. Give 0 up to the number of "
                "layers less one"
            )
        if self.cpu_offloading and not self.cpu_offloading_activations and not self.cpu_offloading_weights:
            raise PlanError(
                "cpu_offloading is on, and neither activations nor weights are offloaded. Set "
                "cpu_offloading_activations or cpu_offloading_weights"
            )
        if not self.cpu_offloading and (given := self._given()):
            raise PlanError(f"{', '.join(given)} has no effect without cpu_offloading=True")

    def _given(self) -> list[str]:
        """The options that differ from their defaults."""
        defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
        return [name for name, default in defaults.items() if getattr(self, name) != default]

    def apply(self, model: nn.Module) -> nn.Module:
        """Set a model up for training as the options say. Returns it, untouched if `cpu_offloading` is off.

        Args:
            model: Where it computes, with as many layers as the options need, and one more.

        Raises:
            PlanError: It has too few layers.
        """
        if not self.cpu_offloading:
            return model
        return offload_training(
            model,
            layers=self.cpu_offloading_num_layers,
            activations=self.cpu_offloading_activations,
            weights=self.cpu_offloading_weights,
            double_buffering=self.cpu_offloading_double_buffering,
        )
