"""Directories of transformers in and out, where it is installed: what `save_pretrained` writes, `from_pretrained` reads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import export
from autopar.runtime import CheckpointError
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import load_weights
from autopar.runtime.data.safetensors import read_header
from autopar.runtime.program.manifest import Manifest

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, Any] = {
    "tied Llama": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **SIZES, **HEADS, **TOKENS),
    "untied Llama": lambda: transformers.LlamaConfig(tie_word_embeddings=False, **SIZES, **HEADS, **TOKENS),
    "GPT-2": lambda: transformers.GPT2Config(**GPT2),
    "Mixtral": lambda: transformers.MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, **SIZES, **HEADS, **TOKENS
    ),
}
IDS = torch.randint(3, 60, (8, 8), generator=torch.Generator().manual_seed(5))


def model_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """Every parameter random, so that none is what initialization makes of it."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=make) * 0.1)
    return model


def compiled(model: Any, **options: Any) -> autopar.ParallelProgram:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    batch = {"input_ids": IDS, "labels": IDS}
    return autopar.compile(
        model, autopar.ClusterSpec.local(2), batch, optimizer=sgd, options=autopar.Options(**options)
    )


def through(program: autopar.ParallelProgram, source: Path, folder: Path, steps: int = 0) -> list[torch.Tensor]:
    """Weights in, steps, a checkpoint and weights out to `folder / "again"`; every step's loss."""
    out = program.save(folder / "out")
    batch = program.leaves({"input_ids": IDS, "labels": IDS})

    def body(session: Any) -> list[torch.Tensor]:
        load_weights(source, session, Manifest.read(out))
        losses = [session.train_step(list(batch)).clone() for _ in range(steps)]
        checkpoint.save(folder / "saved", session)
        return losses

    losses = program.on_ranks(body)[0]
    config = source / "config.json"
    arguments = [out, folder / "saved", folder / "again", "--max-shard-size", "20KB", "--config", config]
    assert export.main([str(one) for one in arguments]) == 0
    return losses


def pretrained(folder: Path, **given: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given)


@pytest.mark.parametrize("name", ["tied Llama", "untied Llama", "GPT-2"])
def test_files_come_out_as_save_pretrained_writes_them(name: str, tmp_path: Path) -> None:
    model_of(name, 1).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    through(compiled(model_of(name, 2), strategy="zero3"), tmp_path / "hf", tmp_path)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(path.name for path in (tmp_path / "again").glob("*.safetensors"))
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    again, want = pretrained(tmp_path / "again").state_dict(), model_of(name, 1).state_dict()
    assert again.keys() == want.keys()
    assert all(torch.equal(again[key], value) for key, value in want.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_trained_loads_with_from_pretrained(name: str, tmp_path: Path) -> None:
    """Mixtral's files have other names than its parameters; what is written under the latter loads all the same."""
    model = model_of(name, 1)
    program = compiled(model)
    model.config.save_pretrained(tmp_path)
    out = program.save(tmp_path / "out")
    batch = program.leaves({"input_ids": IDS, "labels": IDS})

    def body(session: Any) -> list[torch.Tensor]:
        session.train_step(list(batch))
        checkpoint.save(tmp_path / "saved", session)
        return session.train_step(list(batch)).clone()

    loss = program.on_ranks(body)[0]
    arguments = [out, tmp_path / "saved", tmp_path / "hf", "--config", tmp_path / "config.json"]
    assert export.main([str(one) for one in arguments]) == 0
    again = pretrained(tmp_path / "hf").train()
    torch.testing.assert_close(again(input_ids=IDS, labels=IDS).loss, loss, rtol=1e-5, atol=1e-6)
    state, saved = again.state_dict(), checkpoint.TensorSource(tmp_path / "saved")
    for key in state.keys() & saved.signatures.keys():
        assert torch.equal(state[key], saved.read(key)), key


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
def test_dtypes_are_converted_as_from_pretrained_does(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model_of("tied Llama", 1, stored).save_pretrained(tmp_path / "hf")
    through(compiled(model_of("tied Llama", 2, wanted)), tmp_path / "hf", tmp_path)
    for path in (tmp_path / "again").glob("*.safetensors"):
        assert {one.dtype for one in read_header(path).values()} == {wanted}
    want, again = (pretrained(tmp_path / name, dtype=wanted).state_dict() for name in ("hf", "again"))
    assert all(torch.equal(again[key], value) for key, value in want.items())


def test_a_model_whose_parameters_alone_are_on_meta_trains_from_a_directory(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    real = model_of("tied Llama", 1)
    real.save_pretrained(tmp_path / "hf")
    with accelerate.init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(CONFIGS["tied Llama"]())
    empty.tie_weights()
    assert next(empty.parameters()).is_meta
    program = compiled(empty, mesh={"dp": 2})
    out = program.save(tmp_path / "out")
    batch = program.leaves({"input_ids": IDS, "labels": IDS})

    def body(comm: Any) -> torch.Tensor:
        session = autopar.runtime.Session(
            program.in_process.pipeline, program.in_process.stages, comm, program.request.update
        )
        load_weights(tmp_path / "hf", session, Manifest.read(out))
        return session.train_step(list(batch)).clone()

    loss = program.in_process.run_bare(body)[0]
    torch.testing.assert_close(loss, real.train()(input_ids=IDS, labels=IDS).loss, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_on_meta_with_its_buffers_says_what_it_lacks(tmp_path: Path) -> None:
    model_of("tied Llama", 1).save_pretrained(tmp_path / "hf")
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(CONFIGS["tied Llama"]())
    program = compiled(empty)
    out = program.save(tmp_path / "out")

    def body(comm: Any) -> None:
        session = autopar.runtime.Session(
            program.in_process.pipeline, program.in_process.stages, comm, program.request.update
        )
        load_weights(tmp_path / "hf", session, Manifest.read(out))

    with pytest.raises(CheckpointError, match=r"has no model.rotary_emb.inv_freq.*parameters alone on meta"):
        program.in_process.run_bare(body)


def test_the_base_model_and_converted_names_are_refused_by_name(tmp_path: Path) -> None:
    transformers.GPT2Model(CONFIGS["GPT-2"]()).save_pretrained(tmp_path / "base")
    with pytest.raises(
        CheckpointError, match=r"holds no transformer.wte.weight.* h.0.attn.* these lack 'transformer.'"
    ):
        through(compiled(model_of("GPT-2", 2)), tmp_path / "base", tmp_path)
    model_of("Mixtral", 1).save_pretrained(tmp_path / "mixtral")
    with pytest.raises(CheckpointError, match=r"experts.0.w1.weight.*renames or joins while it loads, from_pretrained"):
        through(compiled(model_of("Mixtral", 2)), tmp_path / "mixtral", tmp_path)


def test_adapters_go_out_under_their_own_names_and_need_more_than_a_base_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model_of("tied Llama", 1).save_pretrained(tmp_path / "hf")

    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        return peft.get_peft_model(model_of("tied Llama", seed), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    model = adapted(1)
    program = compiled(model)
    with pytest.raises(CheckpointError, match="the program's model has adapters"):
        through(program, tmp_path / "hf", tmp_path)
    out = program.save(tmp_path / "out")
    assert export.main([str(out), str(out / "weights"), str(tmp_path / "again")]) == 0
    other = adapted(2)
    state = pytest.importorskip("safetensors.torch").load_file(tmp_path / "again" / "model.safetensors")
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("lm_head" in name for name in missing)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
