"""A causal language model from a GGUF file, dequantised while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trivet.errors import ModelLoadError
from trivet_torch.weights._listing import listed
from trivet_torch.weights.gguf_config import config_from_gguf
from trivet_torch.weights.gguf_dequant import check_type, dequantize_into, jobs_for, run_jobs
from trivet_torch.weights.gguf_names import Placement, is_parameter, place

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig, PreTrainedModel

    from trivet.gguf import GGMLType, GGUFFile, TensorInfo


def load_gguf(
    file: GGUFFile, *, dtype: torch.dtype, device: str | torch.device, attn_implementation: str
) -> PreTrainedModel:
    """Build the model that ``file`` describes and fill it.

    Every parameter is allocated once, uninitialised, in its final dtype and place, and written there chunk by chunk.

    Raises:
        ModelLoadError: The architecture or a tensor's type is not supported, a tensor has no place in the model or the
            wrong shape, or a parameter is left unfilled; names what is concerned.
    """
    config = config_from_gguf(file)
    # Before anything large is allocated.
    placements = _placements(file, config)
    model = build_uninitialised(config, dtype=dtype, device=device, attn_implementation=attn_implementation)
    fill(model, file, placements)
    return model


def build_uninitialised(
    config: PreTrainedConfig, *, dtype: torch.dtype, device: str | torch.device, attn_implementation: str
) -> PreTrainedModel:
    """The causal language model of ``config`` with memory for its parameters, tied where it ties them, but no values.

    Buffers (rotary frequencies, embedding scales) are computed by the constructors, on ``device``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(device):
        factory: Any = AutoModelForCausalLM  # its methods carry no annotations
        model: PreTrainedModel = factory.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.tie_weights()
    return model


def _placements(file: GGUFFile, config: PreTrainedConfig) -> dict[str, Placement]:
    """Tensor name -> its place, for every tensor of the file that has to have one."""
    architecture = str(file.metadata["general.architecture"])
    placements: dict[str, Placement] = {}
    unmapped = []
    for name in filter(is_parameter, file.tensors):
        check_type(file, name)
        placement = place(architecture, name, config)
        if placement is None:
            unmapped.append(name)
        else:
            placements[name] = placement
    if unmapped:
        raise ModelLoadError(
            f"{file.path}: no parameter of a {architecture!r} model corresponds to {listed(unmapped)}; "
            "the file holds a variant that is not supported: use the model's safetensors instead"
        )
    return placements


@torch.no_grad()
def fill(model: nn.Module, file: GGUFFile, placements: dict[str, Placement]) -> None:
    """Write the tensors of ``file`` into the parameters of ``model``.

    Raises:
        ModelLoadError: A tensor's parameter does not exist, is filled twice or has another shape, or a parameter or
            persistent buffer of the model stays unfilled; names tensors and parameters.
    """
    targets = model.state_dict(keep_vars=True)
    filled: dict[tuple[int, int | None], str] = {}
    jobs: list[Callable[[], None]] = []
    for name, placement in placements.items():
        target = targets.get(placement.parameter)
        if target is None:
            raise ModelLoadError(
                f"{file.path}: tensor {name!r} belongs to the parameter {placement.parameter!r}, which the model does "
                "not have; the metadata and the tensors of the file disagree: convert the model again"
            )
        # Tied parameters are one object under two names.
        key = (id(target), placement.part and placement.part[0])
        if key in filled:
            raise ModelLoadError(
                f"{file.path}: the tensors {filled[key]!r} and {name!r} both belong to the parameter "
                f"{placement.parameter!r}; convert the model again"
            )
        filled[key] = name
        jobs += _jobs(target, file, file.tensors[name], placement)

    parts_filled: dict[int, int] = {}
    for target_id, _ in filled:
        parts_filled[target_id] = parts_filled.get(target_id, 0) + 1
    parts_needed = {id(targets[p.parameter]): p.part[1] for p in placements.values() if p.part is not None}
    unfilled = [name for name, t in targets.items() if parts_filled.get(id(t), 0) < parts_needed.get(id(t), 1)]
    if unfilled:
        raise ModelLoadError(
            f"{file.path}: the file has no tensor for the parameters {listed(unfilled)}; "
            "it is incomplete: download or convert it again"
        )
    run_jobs(jobs)


def _jobs(target: Tensor, file: GGUFFile, info: TensorInfo, placement: Placement) -> Iterator[Callable[[], None]]:
    """The work that fills one parameter or one part of it; raises :class:`ModelLoadError` if the shapes differ."""
    region = target.detach()
    if placement.part is not None:
        index, count = placement.part
        region = region.chunk(count, dim=-2)[index]
    if [size for size in region.shape if size != 1] != [size for size in info.shape if size != 1]:
        raise ModelLoadError(
            f"{file.path}: tensor {info.name!r} has the shape {list(info.shape)}, but {placement.parameter!r} needs "
            f"{list(region.shape)}; the metadata and the tensors of the file disagree: convert the model again"
        )
    if placement.reorder is not None:
        region = placement.reorder(region)
    raw = file.raw(info.name)
    if placement.offset:
        yield partial(_fill_with_offset, region, raw, info.ggml_type, placement.offset)
    else:
        yield from jobs_for(region, raw, info.ggml_type)


def _fill_with_offset(
    region: Tensor, raw: np.ndarray[Any, np.dtype[np.uint8]], ggml_type: GGMLType, offset: float
) -> None:
    values = torch.empty(region.shape, dtype=torch.float32)
    dequantize_into(values, raw, ggml_type)
    region.copy_(values.add_(offset))
