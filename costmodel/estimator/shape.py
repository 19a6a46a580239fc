"""The shape of a transformer, as far as its cost goes: `TransformerShape`, and how it is cut: `ParallelConfig`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from autopar.errors import ConstraintError, InputError


@dataclass(frozen=True)
class TransformerShape:
    """A decoder-only transformer.

    ffn: width of a dense MLP; moe_ffn: of one expert. attention: "flash" or "materialised" (scores written to memory).
    window: sliding window of every `window_every`-th layer, 0 for none. mla: DeepSeek's low-rank attention dims.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq_len: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated_mlp: bool = False
    experts: int = 0
    topk: int = 0
    moe_ffn: int | None = None
    shared_experts: int = 0
    first_dense_layers: int = 0
    mtp_layers: int = 0
    attention: str = "flash"
    window: int = 0
    window_every: int = 2
    tied_embeddings: bool = False
    mla: tuple[int, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for what in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len"):
            value = getattr(self, what)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"TransformerShape: {what} must be a positive integer, got {value!r}")
        if self.head_dim is None and self.hidden % self.heads:
            raise InputError(
                f"TransformerShape: hidden={self.hidden} is no multiple of heads={self.heads}; "
                "give head_dim if that is meant"
            )
        if self.experts and not 0 < self.topk <= self.experts:
            raise InputError(f"TransformerShape: topk={self.topk} must be in 1..experts={self.experts}")
        if self.attention not in ("flash", "materialised"):
            raise InputError(f"TransformerShape: attention is 'flash' or 'materialised', got {self.attention!r}")

    @property
    def hd(self) -> int:
        """Width of one head (of queries and keys)."""
        if self.mla:
            return self.mla[2] + self.mla[3]
        return self.head_dim or self.hidden // self.heads

    @property
    def q_width(self) -> int:
        """Heads times head width."""
        return self.heads * self.hd

    @property
    def v_width(self) -> int:
        """Width of what attention returns."""
        return self.heads * (self.mla[4] if self.mla else self.hd)

    @property
    def kv_width(self) -> int:
        """Width of keys (and of values) that are projected."""
        return (self.kv_heads or self.heads) * self.hd

    @property
    def expert_ffn(self) -> int:
        """Width of one expert."""
        return self.moe_ffn or self.ffn

    @property
    def most_stages(self) -> int:
        """Into how many stages the model can be cut: table, layers, last norm and head."""
        return self.layers + 3

    @property
    def moe_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.first_dense_layers if self.experts else 0

    def attention_params(self) -> int:
        """Weights of one layer's attention."""
        h = self.hidden
        if self.mla:
            q_rank, kv_rank, nope, rope, v = self.mla
            q = h * q_rank + q_rank * self.q_width
            return q + h * (kv_rank + rope) + kv_rank * self.heads * (nope + v) + self.v_width * h
        return h * (self.q_width + 2 * self.kv_width) + self.q_width * h

    def mlp_params(self, width: int) -> int:
        """Weights of one MLP."""
        return (3 if self.gated_mlp else 2) * self.hidden * width

    def layer_params(self, moe: bool, expert_share: float = 1.0) -> float:
        """Weights of one layer; `expert_share` of the experts counted (1/ep: those on one rank)."""
        norms = 2 * self.hidden
        if not moe:
            return self.attention_params() + self.mlp_params(self.ffn) + norms
        experts = (self.experts * expert_share + self.shared_experts) * self.mlp_params(self.expert_ffn)
        return self.attention_params() + experts + self.hidden * self.experts + norms

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding table."""
        return self.vocab * self.hidden

    @property
    def params(self) -> float:
        """All weights."""
        body = (self.layers - self.moe_layers) * self.layer_params(False)
        body += (self.moe_layers + self.mtp_layers * bool(self.experts)) * self.layer_params(bool(self.experts))
        return body + self.embedding_params * (1 if self.tied_embeddings else 2)

    def attended(self) -> float:
        """Average keys a query sees, causal."""
        full = self.seq_len / 2
        if not self.window or self.window >= self.seq_len:
            return full
        return (full * (self.window_every - 1) + min(self.window, full)) / self.window_every

    def flops_per_token(self, causal: bool = True) -> float:
        """Model FLOPs of one token, forward and backward (3x forward); no recompute, input embedding not counted."""
        active = self.layers * self.attention_params() + (self.layers - self.moe_layers) * self.mlp_params(self.ffn)
        active += (
            self.moe_layers * (self.topk + self.shared_experts) * self.mlp_params(self.expert_ffn)
            if self.experts
            else 0
        )
        keys = self.attended() if causal else self.seq_len
        per_layer_attention = 2 * keys * (self.q_width + self.v_width)
        heads = 1 + self.mtp_layers
        return 3 * (2 * active + self.layers * per_layer_attention + heads * 2 * self.embedding_params)

    @staticmethod
    def from_hf_config(config: Mapping[str, Any], seq_len: int | None = None) -> TransformerShape:
        """Reads a Hugging Face `config.json`. Raises InputError naming the first missing key."""

        def get(*names: str, default: Any = None) -> Any:
            for name in names:
                if config.get(name) is not None:
                    return config[name]
            if default is None:
                raise InputError(f"config.json has none of {', '.join(names)}; is it a decoder-only transformer?")
            return default

        hidden, heads = get("hidden_size", "n_embd", "d_model"), get("num_attention_heads", "n_head", "n_heads")
        experts = get("num_local_experts", "num_experts", "n_routed_experts", default=0)
        mla = None
        if config.get("kv_lora_rank"):
            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            mla = tuple(int(config.get(k) or hidden) for k in keys)
        gated = config.get("model_type") not in ("gpt2", "gpt_neox", "opt", "bloom", "mpt", "gptj", "falcon", "phi")
        return TransformerShape(
            layers=get("num_hidden_layers", "n_layer", "n_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=get("num_key_value_heads", default=heads),
            head_dim=config.get("head_dim"),
            ffn=get("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
            vocab=get("vocab_size"),
            seq_len=seq_len or min(8192, get("max_position_embeddings", "n_positions", "max_seq_len", default=2048)),
            gated_mlp=gated,
            experts=experts,
            topk=get("num_experts_per_tok", "moe_topk", default=2) if experts else 0,
            moe_ffn=config.get("moe_intermediate_size"),
            shared_experts=get("n_shared_experts", default=0),
            first_dense_layers=get("first_k_dense_replace", default=0),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            mla=mla,
            name=str(config.get("_name_or_path") or config.get("model_type") or ""),
        )


class Cut(NamedTuple):
    """A dim of so many units over ranks of axes: a unit is what may not be torn. unequal: ranks may differ by a unit."""

    what: str
    units: int
    axes: str
    ranks: int
    unequal: bool

    @property
    def is_possible(self) -> bool:
        """Whether the units divide by the ranks, or every rank has some of them where ranks may differ."""
        return self.units % self.ranks == 0 or (self.unequal and self.units > self.ranks)


class Parts(NamedTuple):
    """Into how many parts tp cuts attention (its heads), an MLP, an expert, the vocabulary and the sequence (of norms and
    residuals); into as many as the longest part would make where ranks differ."""

    heads: float
    mlp: float
    expert: float
    vocabulary: float
    positions: float


@dataclass(frozen=True)
class ParallelConfig:
    """How many ways each kind of parallelism cuts. zero: 0 none, 1 optimizer, 2 +gradients, 3 +parameters.

    ep: ranks (out of tp*cp*dp) that share the experts. shard_group: ranks over which ZeRO shards, None for all of dp.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    zero: int = 0
    shard_group: int | None = None

    @property
    def ranks(self) -> int:
        """Devices needed."""
        return prod((self.dp, self.tp, self.pp, self.cp))

    @property
    def axes(self) -> dict[str, int]:
        """The axes of a stage's mesh in emitted programs, major first: experts are apart over a part of dp."""
        return {"dp": self.dp // self.ep, "ep": self.ep, "cp": self.cp, "tp": self.tp}

    @property
    def V(self) -> int:
        """Chunks per stage."""
        return self.vpp or 1

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters: they share the batch or the sequence."""
        return self.dp * self.cp

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.data_ranks * self.tp // (self.ep * self.expert_tp))

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside an expert: tp while the expert groups fit beside it, else none."""
        return self.tp if self.ep <= self.dp * self.cp else 1

    def cuts(self, model: TransformerShape, unequal: bool = False) -> Iterator[Cut]:
        """The dims that the plan cuts: this alone says which sizes of a model must divide. unequal: parts may differ by a unit,
        as in emitted programs, but for positions that no other dim's units divide."""
        yield from self._over_tp(model, unequal)
        if model.experts:
            yield Cut("experts", model.experts, "ep", self.ep, unequal)
        split = {"cp": self.cp, "tp": self.tp if self.sequence_parallel else 1}
        names = [name for name, size in split.items() if size > 1]
        positions, rest = divmod(model.seq_len, self.cp)
        in_units = (
            unequal and self.sequence_parallel and not rest and any(positions % n == 0 for n in self.units(model))
        )
        yield Cut("positions", model.seq_len, "*".join(names), prod(split.values()), in_units)

    def _over_tp(self, model: TransformerShape, unequal: bool) -> Iterator[Cut]:
        if self.tp > 1:
            yield Cut("heads", model.heads, "tp", self.tp, unequal)
            yield Cut(
                "heads of keys", model.heads if model.mla else model.kv_heads or model.heads, "tp", self.tp, unequal
            )
            yield Cut("entries of the vocabulary", model.vocab, "tp", self.tp, unequal)
            if model.moe_layers < model.layers:
                yield Cut("features of an MLP", model.ffn, "tp", self.tp, unequal)
        if model.experts and not self._whole_experts(model):
            yield Cut("features of an expert", model.expert_ffn, "tp", self.expert_tp, unequal)

    def impossible(self, model: TransformerShape, unequal: bool = False) -> list[Cut]:
        """The cuts that cannot be made."""
        return [cut for cut in self.cuts(model, unequal) if not cut.is_possible]

    def units(self, model: TransformerShape) -> tuple[int, ...]:
        """The sizes that tp does not divide, in ascending order and without multiples of others: a dim is cut in units of the
        first of them that it is a multiple of."""
        found: list[int] = []
        for size in sorted(cut.units for cut in self._over_tp(model, True) if cut.units % self.tp):
            found += [size] if all(size % unit for unit in found) else []
        return tuple(found)

    def _whole_experts(self, model: TransformerShape) -> bool:
        """Whether experts are apart over tp."""
        return self.ep == 1 and model.experts % self.tp == 0

    def parts(self, model: TransformerShape, unequal: bool) -> Parts:
        """The parts along tp."""
        units = self.units(model) if unequal else ()

        def parts(size: int, ranks: int = self.tp) -> float:
            unit = next((unit for unit in units if ranks > 1 and size % unit == 0), 0)
            return unit / -(-unit // ranks) if unit else ranks

        heads, positions = model.heads if model.mla else model.kv_heads or model.heads, model.seq_len // self.cp
        return Parts(
            heads=parts(heads),
            mlp=parts(model.ffn),
            expert=parts(model.experts if self._whole_experts(model) else model.expert_ffn, self.expert_tp),
            vocabulary=parts(model.vocab),
            positions=parts(positions) if self.sequence_parallel else 1,
        )

    def microbatches(self, batch: int, micro_batch: int, unequal: bool) -> int:
        """Microbatches of a step; where ranks may differ the fewest of which none has more than micro_batch sequences of each."""
        rows = self.dp * micro_batch
        return _least_divisor(batch, -(-batch // rows)) if unequal else max(1, batch // rows)

    def check(self, model: TransformerShape, ranks: int, batch: int, micro_batch: int, unequal: bool = False) -> None:
        """Raises ConstraintError, naming the sizes and a fix, when the plan does not fit model or cluster. unequal: whether ranks
        may hold parts that differ by a unit."""
        for name in ("dp", "tp", "pp", "cp", "ep"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConstraintError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.ranks != ranks:
            raise ConstraintError(
                f"dp={self.dp} x tp={self.tp} x pp={self.pp} x cp={self.cp} = {self.ranks} ranks, but the cluster has "
                f"{ranks}; with tp, pp, cp as they are dp would be {ranks / (self.tp * self.pp * self.cp):g}"
            )
        if self.pp * self.V > model.most_stages:
            raise ConstraintError(
                f"{model.layers} layers cannot fill pp={self.pp} x vpp={self.V} = {self.pp * self.V} chunks; "
                "lower pp or vpp"
            )
        if self.ep > 1 and not model.experts:
            raise ConstraintError(f"ep={self.ep}, but the model has no experts; use ep=1")
        for cut in self.impossible(model, unequal):
            fits = max(n for n in range(1, min(cut.ranks, cut.units) + 1) if cut._replace(ranks=n).is_possible)
            raise ConstraintError(
                f"{cut.units} {cut.what} cannot be split over {cut.axes}={cut.ranks}; the next smaller that fits: {fits}"
            )
        if self.ep > 1 and (self.dp * self.cp * self.tp) % self.ep:
            raise ConstraintError(f"ep={self.ep} must divide dp*cp*tp={self.dp * self.cp * self.tp}")
        if unequal:
            self._check_rows(batch, micro_batch)
        elif batch % (self.dp * micro_batch):
            raise ConstraintError(
                f"batch={batch} is no multiple of dp*micro_batch={self.dp * micro_batch}; "
                f"nearest: {max(1, round(batch / (self.dp * micro_batch))) * self.dp * micro_batch}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ConstraintError(f"zero is 0, 1, 2 or 3, got {self.zero!r}")

    def _check_rows(self, batch: int, micro_batch: int) -> None:
        """Raises ConstraintError where no microbatches have so many sequences for the rank that takes most, and some for each."""
        rows = batch // self.microbatches(batch, micro_batch, True)
        if rows < self.dp or -(-rows // self.dp) < micro_batch:
            raise ConstraintError(
                f"batch={batch} has no microbatches of {micro_batch} sequences for each of dp={self.dp} ranks, "
                f"or one less for some; nearest: {max(1, round(batch / (self.dp * micro_batch))) * self.dp * micro_batch}"
            )
        groups = max(1, self.dp // self.ep)
        if self.ep > 1 and rows % groups:
            raise ConstraintError(
                f"a microbatch of {rows} sequences does not divide by the {groups} groups of dp={self.dp} that share experts "
                f"over ep={self.ep}"
            )


@lru_cache(maxsize=65536)
def _least_divisor(n: int, least: int) -> int:
    """The least divisor of n that is not less than `least`."""
    return next(d for d in range(least, n + 1) if n % d == 0)
