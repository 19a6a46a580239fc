"""`Layout`: the decisions that formats of other systems share, in the field's words.

A plan says of every value how it lies; other systems say degrees, a stage of ZeRO, a schedule, and styles of modules. On 8 ranks

    Layout(dp=2, tp=2, pp=2, zero=1, schedule="1f1b", micro_batch=1, global_batch=16)

is what Megatron says as `--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer …` and
DeepSpeed partly as JSON. `autopar.exchange.from_plan` makes a layout of a program, `autopar.exchange.to_options` the options of a
compilation from a layout, and each file of `autopar.exchange.formats` writes and reads one format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autopar.errors import InputError

STYLES = {
    "colwise": "output features cut over tp, the result left so for a rowwise module after it",
    "colwise_gather": "output features cut over tp, the result gathered",
    "rowwise": "input features cut over tp, of an input that comes so; results added up",
    "rowwise_split": "input features cut over tp, of an input that comes whole; results added up",
    "vocab": "entries of a table cut over tp, results added up",
}
"""The ways of a module of two dims along tp."""


@dataclass(frozen=True)
class StageUnits:
    """The contents of a stage of a pipeline: whether the embedding, how many layers, whether what follows (norm, head, loss)."""

    layers: int
    embedding: bool = False
    loss: bool = False


@dataclass(frozen=True)
class Layout:
    """A distributed training step in the field's words. None is what a file leaves to others.

    dp: ranks that take the batch (None: as many as the other degrees leave). replicas: groups of these that each hold all shards
    (HSDP); 1 where ZeRO shards over all of dp. tp, cp, ep, pp: degrees of tensor, context, expert and pipeline parallelism; ep is
    a part of dp. etp: tensor parallelism inside experts (None: as the system has it). virtual_stages: stages per rank of the
    pipeline. schedule: of the pipeline, a name of `autopar.ir.schedules`. table: its actions, a row per group, where they do not
    follow from the name. micro_batch: sequences that a rank of dp takes at a time; global_batch: of a step. stages: units of
    every stage in order (empty: evenly). sequence_parallel: between products tp cuts the sequence. zero: stage of ZeRO, 0 to 3.
    reshard_after_forward: whether gathered parameters go again between forward and backward (zero=3). recompute: "none",
    "selective" or "full"; recompute_layers: layers of a stage it is of (None: all). offload: as `Options.offload`.
    precision: "bf16", "fp16", or "" as the model is. modules: style (of STYLES) by module path. overlap_gradients,
    overlap_parameters: whether these travel behind compute.
    """

    dp: int | None = None
    replicas: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    virtual_stages: int = 1
    schedule: str = ""
    table: tuple[str, ...] = ()
    micro_batch: int | None = None
    global_batch: int | None = None
    stages: tuple[StageUnits, ...] = ()
    sequence_parallel: bool = False
    zero: int = 0
    reshard_after_forward: bool | None = None
    recompute: str = "none"
    recompute_layers: int | None = None
    offload: str = "none"
    precision: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    overlap_gradients: bool | None = None
    overlap_parameters: bool | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a degree that is no whole number from 1 on, or a stage of ZeRO that there is not."""
        for name in ("dp", "replicas", "tp", "cp", "ep", "etp", "pp", "virtual_stages", "micro_batch", "global_batch"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise InputError(f"{name} is a whole number from 1 on, not {size!r}")
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"zero is a stage of ZeRO, 0 to 3, not {self.zero!r}")

    @property
    def ranks(self) -> int | None:
        """Ranks in all; None where dp is left to others."""
        return None if self.dp is None else self.dp * self.tp * self.cp * self.pp

    @property
    def dp_replicate(self) -> int | None:
        """Ranks of dp with copies of the same state."""
        return self.replicas if self.zero else self.dp

    @property
    def dp_shard(self) -> int | None:
        """Ranks of dp that the state is cut over."""
        return (None if self.dp is None else self.dp // self.replicas) if self.zero else 1

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step on a rank of dp; None where it is not known. Raises InputError where they do not divide."""
        if self.dp is None or self.micro_batch is None or self.global_batch is None:
            return None
        count, rest = divmod(self.global_batch, self.dp * self.micro_batch)
        if rest or not count:
            raise InputError(
                f"a global batch of {self.global_batch} is no multiple of micro batch {self.micro_batch} on dp={self.dp}; "
                "change one of these"
            )
        return count

    def on(self, ranks: int) -> Layout:
        """The layout with dp filled in for so many ranks. Raises InputError where they are no multiple of the other degrees, or
        another number than it says."""
        others = self.tp * self.cp * self.pp
        if ranks % others or self.dp not in (None, ranks // others):
            degrees = f"tp={self.tp} cp={self.cp} pp={self.pp}" + (f" dp={self.dp}" if self.dp else "")
            raise InputError(
                f"{degrees} is not for {ranks} ranks; give a cluster of as many ranks as the degrees multiply to"
            )
        dp = ranks // others
        if dp % self.ep or (self.zero and dp % self.replicas):
            raise InputError(f"dp={dp} is no multiple of ep={self.ep} and replicas={self.replicas}")
        return replace(self, dp=dp)

    def only(self, carried: Collection[str]) -> Layout:
        """The layout that is left where only these fields are carried; ranks of other degrees are dp's, which `on` fills in."""
        default = Layout()
        left = {f.name: getattr(default, f.name) for f in fields(self) if f.name not in carried}
        return replace(self, **{**left, "dp": None})

    def said(self) -> dict[str, Any]:
        """The fields that are not as they are by default."""
        default = Layout()
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != getattr(default, f.name)}


@dataclass(frozen=True)
class NotCarried:
    """A decision that is lost on the way to a format. what: the decision; instead: what the format has in its place."""

    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: {self.instead}"
