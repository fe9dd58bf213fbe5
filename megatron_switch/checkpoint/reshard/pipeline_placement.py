"""Which pipeline stage holds which layer, in equal shares or as flags of Megatron's say.

Equal shares are the rule. ``--decoder-first-pipeline-num-layers`` and its counterpart for the last
stage give the ends a number of their own, and the stages between share the rest equally;
``--pipeline-model-parallel-layout`` lists the layers of every stage, in chunks where stages are
interleaved. The embedding is on the first stage and what follows the last layer on the last, in all
of them.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_switch.errors import LayoutError
from megatron_switch.flags.argv import flag_name

_ATTRIBUTES = {
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "layout": "pipeline_model_parallel_layout",
}
PLACEMENT_FLAGS: Mapping[str, str] = {
    name: flag_name(attribute) for name, attribute in _ATTRIBUTES.items()
}
"""The flag of each field of :class:`Placement`."""


@dataclass(frozen=True)
class Placement:
    """How layers are placed on pipeline stages; without values, in equal shares."""

    first: int | None = None
    """Layers of the first stage."""
    last: int | None = None
    """Layers of the last stage."""
    layout: str | None = None
    """Every stage by its layers' letters, such as ``Ett|ttL``; excludes the other two."""

    @classmethod
    def of(cls, args: Namespace) -> "Placement":
        """Return what a run's arguments say."""
        return cls(**{name: getattr(args, each, None) for name, each in _ATTRIBUTES.items()})

    def write_to(self, args: Namespace) -> None:
        """Make a run's arguments say this placement, and nothing else about stages."""
        for name, attribute in _ATTRIBUTES.items():
            setattr(args, attribute, getattr(self, name))
        for attribute in (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ):
            setattr(args, attribute, False)
        for attribute in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "virtual_pipeline_model_parallel_size",
        ):
            setattr(args, attribute, None)

    def stages(self, num_layers: int, pp: int) -> tuple[int, ...]:
        """Return the stage of each layer.

        Args:
            num_layers: Layers of the model.
            pp: Pipeline stages.

        Raises:
            LayoutError: The layers do not go onto the stages.
        """
        if self.layout is not None:
            return self._parsed_layout(self.layout, num_layers, pp)
        if self.first is None and self.last is None:
            counts = _equal_shares(num_layers, pp, "")
        else:
            counts = self._with_own_ends(num_layers, pp)
        return tuple(stage for stage, count in enumerate(counts) for _ in range(count))

    def _with_own_ends(self, num_layers: int, pp: int) -> list[int]:
        named = [f"{PLACEMENT_FLAGS[name]} {count}" for name, count in self._ends().items()]
        ends = " and ".join(named)
        if pp < 2:
            raise LayoutError(
                f"One pipeline stage has all layers, got {ends}. Leave it out, or set "
                "--pipeline-model-parallel-size."
            )
        rest = num_layers - sum(self._ends().values())
        between = pp - len(self._ends())
        # Megatron builds no stage without layers between two ends of their own.
        if min(self._ends().values()) < 1 or rest < 0 or bool(rest) != bool(between):
            raise LayoutError(
                f"The {num_layers} layers of the model go onto {pp} pipeline stages, at least one "
                f"onto each, got {ends}. Change the numbers."
            )
        middle = _equal_shares(rest, between, f" beside {ends}") if between else []
        first = [] if self.first is None else [self.first]
        return [*first, *middle, *([] if self.last is None else [self.last])]

    def _ends(self) -> dict[str, int]:
        both = {"first": self.first, "last": self.last}
        return {name: count for name, count in both.items() if count is not None}

    def _parsed_layout(self, text: str, num_layers: int, pp: int) -> tuple[int, ...]:
        flag = PLACEMENT_FLAGS["layout"]
        if self._ends():
            raise LayoutError(
                f"{flag} places every layer; leave out "
                f"{' and '.join(PLACEMENT_FLAGS[name] for name in self._ends())}."
            )
        try:
            parsed = PipelineParallelLayerLayout(text, pp)
            parsed.validate_layer_layout(num_layers, 0)
        except (AssertionError, NotImplementedError) as error:
            raise LayoutError(
                f"{flag} {text} does not place {num_layers} layers on {pp} stages: {error}. Write "
                "E for the embedding, t for each layer, L for the loss and | between stages."
            ) from error
        chunks = parsed.virtual_pipeline_model_parallel_size
        if pp < 2 and chunks > 1:
            raise LayoutError(
                f"{flag} {text} makes {chunks} chunks of one pipeline stage, and only two stages "
                "or more have chunks. Set --pipeline-model-parallel-size, or leave the layout out."
            )
        return tuple(
            stage
            for chunk in range(chunks)
            for stage in range(pp)
            for _ in range(parsed.layout[stage][chunk].count(LayerType.decoder))
        )


def _equal_shares(num_layers: int, stages: int, beside: str) -> list[int]:
    if num_layers % stages:
        raise LayoutError(
            f"{num_layers} layers cannot be shared evenly by {stages} pipeline stages{beside}. "
            "Change --pipeline-model-parallel-size, or place layers unevenly with "
            f"{PLACEMENT_FLAGS['first']}, {PLACEMENT_FLAGS['last']} or "
            f"{PLACEMENT_FLAGS['layout']}."
        )
    return [num_layers // stages] * stages
