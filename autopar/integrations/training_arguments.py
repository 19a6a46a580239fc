"""Every argument of transformers.TrainingArguments under autopar: the one table, of which the docs' is made.

honoured       means what it means without autopar
by autopar     what it asks for is done, or decided, by the compiler
no effect      it is about a way of being parallel, or of saving memory, that is not used
refused        raises InputError where it is set to anything but what `unless` says
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import InputError

HONOURED, BY_AUTOPAR, NO_EFFECT, REFUSED = "honoured", "by autopar", "no effect", "refused"


@dataclass(frozen=True)
class Row:
    """Some arguments of which the same becomes. unless: values of a refused one that ask for nothing; what: in words."""

    status: str
    names: Sequence[str]
    what: str = ""
    unless: tuple[Any, ...] = (None, False, "", [], {})


ROWS = (
    Row(
        HONOURED,
        ("per_device_train_batch_size", "per_device_eval_batch_size"),
        "a global batch has so many rows for each rank, whatever the plan does with them; every rank's loader gives all of them",
    ),
    Row(HONOURED, ("num_train_epochs", "max_steps")),
    Row(
        HONOURED,
        ("gradient_accumulation_steps", "average_tokens_across_devices"),
        "batches of an update are steps of the program whose gradients add up; tokens are counted over all of them",
    ),
    Row(HONOURED, ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")),
    Row(
        HONOURED,
        ("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        "the trainer makes the optimizer and its groups, each rank makes it again over its shards; one that cannot be made so is "
        "refused by name",
    ),
    Row(HONOURED, ("max_grad_norm",), "the norm over all ranks, which is logged too"),
    Row(HONOURED, ("label_smoothing_factor",)),
    Row(
        BY_AUTOPAR,
        ("bf16",),
        "Options(precision='bf16'): which ops compute narrow is autopar's table, not torch.autocast's",
    ),
    Row(
        BY_AUTOPAR,
        (
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
        ),
        "what is recomputed follows from the memory there is; Options(recompute=…) says more",
    ),
    Row(HONOURED, ("bf16_full_eval", "fp16_full_eval"), "of evaluation outside of training"),
    Row(HONOURED, ("tf32", "use_cache", "full_determinism")),
    Row(
        HONOURED,
        (
            "logging_strategy",
            "logging_steps",
            "logging_first_step",
            "log_on_each_node",
            "logging_nan_inf_filter",
            "include_num_input_tokens_seen",
            "log_level",
            "log_level_replica",
            "disable_tqdm",
            "report_to",
            "run_name",
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
        ),
        "by the first rank",
    ),
    Row(
        HONOURED,
        (
            "eval_strategy",
            "eval_steps",
            "eval_delay",
            "prediction_loss_only",
            "eval_on_start",
            "eval_do_concat_batches",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "eval_use_gather_object",
        ),
    ),
    Row(
        HONOURED,
        (
            "save_strategy",
            "save_steps",
            "save_total_limit",
            "save_only_model",
            "load_best_model_at_end",
            "metric_for_best_model",
            "greater_is_better",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
            "resume_from_checkpoint",
        ),
        "the model as save_pretrained writes it, and the program's state in a folder `autopar`",
    ),
    Row(
        HONOURED,
        (
            "push_to_hub",
            "hub_token",
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
        ),
        "by the first rank",
    ),
    Row(HONOURED, ("seed", "data_seed"), "random numbers of the data and the model's making"),
    Row(
        HONOURED,
        (
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "remove_unused_columns",
            "label_names",
            "train_sampling_strategy",
            "length_column_name",
        ),
    ),
    Row(HONOURED, ("do_train", "do_eval", "do_predict", "output_dir", "skip_memory_metrics", "use_cpu", "local_rank")),
    Row(HONOURED, ("accelerator_config",), "but for split_batches and dispatch_batches, which every rank does without"),
    Row(
        NO_EFFECT,
        (
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "torch_compile_backend",
            "torch_compile_mode",
            "fsdp_config",
            "liger_kernel_config",
            "optim_target_modules",
            "torch_empty_cache_steps",
        ),
        "nothing uses them: there is no DistributedDataParallel, and what they belong to is refused",
    ),
    Row(HONOURED, ("ddp_backend", "ddp_timeout"), "of the process group that the ranks meet in"),
    Row(REFUSED, ("fsdp",), "autopar shards the model; leave it out"),
    Row(REFUSED, ("deepspeed",), "autopar shards the model; leave it out"),
    Row(REFUSED, ("parallelism_config",), "autopar chooses the mesh; Options(mesh=…) forces one"),
    Row(REFUSED, ("torch_compile",), "a program is compiled already; Options and autopar.load say by what"),
    Row(REFUSED, ("fp16",), "use bf16=True: a schedule would go on over updates that loss scaling skips"),
    Row(REFUSED, ("use_liger_kernel",), "its kernels have no graph to be planned; leave it out"),
    Row(REFUSED, ("neftune_noise_alpha",), "its noise is drawn in a hook that no plan repeats; leave it out"),
    Row(REFUSED, ("auto_find_batch_size",), "the plan says what fits before anything runs"),
    Row(REFUSED, ("enable_jit_checkpoint",), "a signal reaches ranks one by one; use save_steps"),
    Row(REFUSED, ("save_on_each_node",), "checkpoints of a program are one directory that all machines see"),
    Row(REFUSED, ("debug",), "it hooks into modules, which a program does not call"),
)
"""Every argument is in one row."""


def check_arguments(args: Any) -> None:
    """Raises InputError for what a trainer's arguments ask for and autopar does not do. args: a TrainingArguments."""
    for row in ROWS:
        for name in row.names if row.status == REFUSED else ():
            value = getattr(args, name, None)
            if not any(value == one and type(value) is type(one) for one in row.unless):
                raise InputError(f"{type(args).__name__}({name}={value!r}) cannot be done with autopar: {row.what}")


def unlisted(arguments: type) -> list[str]:
    """The fields of a TrainingArguments that no row tells of, or more than one."""
    named = [name for row in ROWS for name in row.names]
    return [field.name for field in dataclasses.fields(arguments) if named.count(field.name) != 1]


def table() -> str:
    """The table in Markdown."""
    lines = ["| arguments | | |", "|---|---|---|"]
    lines += [f"| {', '.join(f'`{n}`' for n in row.names)} | {row.status} | {row.what} |" for row in ROWS]
    return "\n".join(lines)


def statuses() -> Mapping[str, str]:
    """The status of every argument."""
    return {name: row.status for row in ROWS for name in row.names}
