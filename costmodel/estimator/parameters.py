"""Seconds that parameters of the fullest stage take: their messages (gathers of values, reductions of gradients) and the update.

A framework's ranks that hold the same parameters are one group, and their messages are as if at once. Emitted programs send
along one axis of the mesh after the other: with dp = 4 and cp = 2 a gradient of 8 MB is scattered over dp, and the 2 MB that
are left of it over cp. Small ones travel in buckets, but for ZeRO-3's gathers, where those of a call do not travel together:
of every parameter there is a message along every axis, and a vector takes a matrix's latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costmodel.bill import ParameterTraffic
from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.memory import stage_params
from autopar.costmodel.estimator.pipeline_time import Layers
from autopar.costmodel.estimator.workload import Workload

Groups = list[tuple[int, int]]
"""(ranks, stride between them) of the groups along which parameters are sent one after the other, major first."""


@dataclass(frozen=True)
class Tensors:
    """Parameters of a stage on one rank that are sent alike. elements: of each; read_again: how many of them backward reads."""

    count: float
    elements: float
    read_again: float
    groups: Groups


def parameter_traffic(w: Workload, layers: Layers) -> ParameterTraffic:
    """Gradient reduction and parameter gathering of the fullest stage.

    ZeRO-3 gathers parameters in every forward and backward, ZeRO-2 and 3 reduce gradients in every backward; the rest is once a
    step.
    """
    p, software = w.parallel, w.software
    if p.data_ranks == 1:
        return ParameterTraffic()
    grad_bytes = software.reduce_bytes or 4.0
    copy_bytes = software.copy_bytes or (
        w.width if p.zero == 3 else 4.0
    )  # parameters are cast before they are gathered
    gather = reduce = 0.0
    for tensors in _tensors(w, layers) if software.is_emitted else _at_once(w, layers):
        if p.zero >= 1:
            gather += sent_s(w, "all_gather", copy_bytes, tensors)
            reduce += sent_s(w, "reduce_scatter", grad_bytes, tensors)
        else:
            reduce += sent_s(w, "all_reduce", grad_bytes, tensors)
    if p.zero >= 1 and not software.is_emitted:
        reduce += sum(sent_s(w, "all_reduce", grad_bytes, tensors) for tensors in _alike(w, layers))
    if p.zero == 3 and software.is_emitted:
        if software.joins_gathers:
            return ParameterTraffic(gather, gather, each_reduce_s=reduce)
        first, again = (gathered_alone_s(w, layers, backward) for backward in (False, True))
        return ParameterTraffic(first, again, each_reduce_s=reduce)
    if p.zero == 3:
        return ParameterTraffic(gather, gather + reduce)
    if p.zero == 2 and not w.software.late_reduction:
        return ParameterTraffic(each_reduce_s=reduce, gather_s=gather)
    return ParameterTraffic(reduce_s=reduce, gather_s=gather)


def sent_s(w: Workload, kind: str, element_bytes: float, tensors: Tensors) -> float:
    """Seconds of tensors' messages of one kind. Emitted programs send small tensors in buckets, which these take a share of."""
    whole = w.software.bucket_bytes if w.software.is_emitted else 0.0
    seconds = 0.0
    for nbytes, ranks, stride in _along(kind, element_bytes * tensors.elements, tensors.groups):
        share = min(nbytes / whole, 1.0) if whole else 1.0
        seconds += share * strided_time_s(w.cluster, kind, max(nbytes, whole), stride, ranks)
    return tensors.count * seconds


def gathered_alone_s(w: Workload, layers: Layers, backward: bool) -> float:
    """Seconds of one microbatch's gathers, of every parameter by itself."""
    return sum(
        (tensors.read_again if backward else tensors.count)
        * strided_time_s(w.cluster, "all_gather", nbytes, stride, ranks)
        for tensors in _tensors(w, layers)
        for nbytes, ranks, stride in _along("all_gather", w.width * tensors.elements, tensors.groups)
    )


def _along(kind: str, nbytes: float, groups: Groups) -> list[tuple[float, int, int]]:
    """(bytes of the full array, ranks, stride) of the messages along groups: what one group scatters is less for the next; sums
    of whole arrays stay whole."""
    messages = []
    for ranks, stride in groups:
        messages.append((nbytes, ranks, stride))
        nbytes /= 1 if kind == "all_reduce" else ranks
    return messages


# --- the parameters


def _tables(w: Workload) -> int:
    """The tables of the fullest stage."""
    return 2 if w.parallel.pp == 1 and not w.model.tied_embeddings and not w.model.experts else 1


def _fullest_params(w: Workload, layers: Layers) -> tuple[float, float]:
    """Parameters of the fullest stage on one rank: (all but experts, experts)."""
    return stage_params(w, max(map(sum, layers)), _tables(w))


def _at_once(w: Workload, layers: Layers) -> tuple[Tensors, Tensors]:
    """The parameters of a framework, sharded over groups of ranks: all but experts, and experts."""
    p = w.parallel
    shared, experts = _fullest_params(w, layers)
    of_all, of_experts = (min(n, p.shard_group or n) if p.zero else n for n in (p.data_ranks, p.expert_data_ranks))
    return Tensors(1, shared, 1, [(of_all, p.tp)]), Tensors(1, experts, 1, [(of_experts, p.ep * p.expert_tp)])


def _alike(w: Workload, layers: Layers) -> list[Tensors]:
    """The shards of these that several groups of ranks have alike."""
    counts = w.parallel.data_ranks, w.parallel.expert_data_ranks
    shards = zip(_at_once(w, layers), counts, strict=True)
    return [
        Tensors(1, whole.elements / group, 1, [(ranks // group, stride * group)])
        for whole, ranks in shards
        for group, stride in whole.groups
    ]


def _tensors(w: Workload, layers: Layers) -> list[Tensors]:
    """The parameters of an emitted program one by one, those of a kind as long as their mean: weights and vectors of layers,
    experts, and tables, whose gradients are made where they are read. Plain MLPs come with biases, as in GPT, which backward does
    not read."""
    m, p, count = w.model, w.parallel, max(map(sum, layers))
    stride, along = 1, {}
    for axis, ranks in reversed(p.axes.items()):
        along[axis] = (ranks, stride)
        stride *= ranks
    of_all, of_experts = [along["dp"], along["ep"], along["cp"]], [along["dp"], along["cp"]]
    shared, experts = stage_params(w, count, 0)
    weights = count * ((5 if m.mla else 4) + (1 + 3 * bool(m.shared_experts) if m.experts else 2 + m.gated_mlp))
    norms = count * (4 if m.mla else 2)
    vectors = norms + (0 if m.gated_mlp else weights + norms)
    return [
        Tensors(weights, shared / weights, weights, of_all),
        Tensors(vectors, m.hidden, norms, of_all),
        Tensors(2 * count, experts / (2 * count), 2 * count, of_experts),
        Tensors(_tables(w), m.embedding_params / w.parts.vocabulary, 0, of_all),
    ]


# --- the update


def update_s(w: Workload, layers: Layers) -> float:
    """Seconds of Adam, which reads and writes about 34 bytes per parameter it owns, and of passes that add up gradients."""
    p = w.parallel
    bytes_moved = 0.0
    ranks = p.shard_group or p.data_ranks
    for params, shards in zip(_fullest_params(w, layers), (ranks, min(ranks, p.expert_data_ranks)), strict=True):
        owned = params / (shards if p.zero else 1)
        bytes_moved += 34 * owned + added_bytes(w, params, owned)
    return bytes_moved / w.memory_Bps


def added_bytes(w: Workload, params: float, owned: float) -> float:
    """Bytes that passes move in a step to add up so many gradients in 32 bits: the first is cast, further ones are read beside
    the sum that they are added to; sums of ZeRO-2 and 3 are of shards."""
    if not w.software.gradient_passes:
        return 0.0
    first = w.microbatches if w.parallel.zero >= 2 else 1
    cast = first * (4 + w.width) * params if w.width < 4 else 0.0
    return cast + (w.microbatches - first) * (8 + w.width) * params + (first - 1) * 12 * owned
