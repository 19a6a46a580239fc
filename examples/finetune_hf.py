"""Fine-tune a model of Hugging Face's transformers on four CPU ranks, and give it back to transformers.

    python examples/finetune_hf.py [--model HF_DIR] [--steps 150] [--out out/finetune]
    python examples/finetune_hf.py --resume --steps 300

Without --model it starts from a small Llama of random weights and a tokenizer trained on the spot; the text is the language
reference that Python itself ships with. The compiler writes two programs, one that trains and one that evaluates;
torchrun starts `train` below once per rank: a DataLoader, one call of the program per step, checkpoints. Then
autopar-export writes safetensors, which `from_pretrained` loads. Needs `pip install -e '.[models]'`.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

import autopar

BATCH, SEQ, SEED = 16, 128, 7
LEARNING_RATE = 1e-3


# --- data: the same on every rank; a program takes global batches -----------------------------------------------------


class ShuffledBatches(Sampler[list[int]]):
    """Endless batches of row numbers, in another random order every epoch.

    All its state is the number of batches that were drawn. A step draws one, so a checkpoint's step says where to go on.
    """

    def __init__(self, rows: int, batch: int, seed: int, drawn: int = 0) -> None:
        self.rows, self.batch, self.seed, self.drawn = rows, batch, seed, drawn

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self.drawn, self.rows // self.batch)
        while True:
            order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
            for place in range(first, self.rows // self.batch):
                yield order[place * self.batch : (place + 1) * self.batch]
            epoch, first = epoch + 1, 0


def token_rows(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """The text as rows of tokens, for training and for evaluation. Two of (rows, SEQ)."""
    documents = [text for _, text in sorted(topics.items())]
    ids = [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(ids[: len(ids) // SEQ * SEQ]).view(-1, SEQ)
    held_out = max(len(rows) // 10 // BATCH, 1) * BATCH
    return rows[:-held_out], rows[-held_out:]


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    """logits: (batch, seq, vocabulary)."""
    following = ids[:, 1:].flatten().to(logits.device)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), following).item()


# --- on every rank ----------------------------------------------------------------------------------------------------


def train(out: Path, start: Path, steps: int, resume: bool) -> None:
    """Train in one of torchrun's processes."""
    from transformers import AutoTokenizer

    rows, held_out = token_rows(AutoTokenizer.from_pretrained(start))
    program = autopar.load(out / "training", weights=start)
    evaluation = autopar.load(out / "evaluation", weights=start)
    if resume:
        program.resume(out / "checkpoint")
    first = program.step
    loader = DataLoader(rows, batch_sampler=ShuffledBatches(len(rows), BATCH, SEED, drawn=first))

    def evaluated() -> str:
        evaluation.load_state_dict(program.state_dict())
        losses = [next_token_loss(evaluation(input_ids=ids), ids) for ids in held_out.split(BATCH)]
        return f"evaluation loss {sum(losses) / len(losses):.6f}"

    say(f"epochs of {len(rows) // BATCH} batches; before: {evaluated()}")
    for step, ids in zip(range(first + 1, steps + 1), loader, strict=False):
        loss = program(input_ids=ids, labels=ids).item()
        if step % 10 == 0 or steps - first <= 20:
            say(f"step {step}  loss {loss:.6f}")
        if step % 50 == 0 or step == steps:
            program.save(out / "checkpoint")
            say(f"step {step}  {evaluated()}")
    torch.distributed.destroy_process_group()


def say(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"  {text}", flush=True)


# --- before and after -------------------------------------------------------------------------------------------------


def small_model(directory: Path) -> Path:
    """A directory as one from the hub: config, random weights, and a tokenizer of 1024 tokens trained on the text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    end, alphabet = "<|endoftext|>", pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(topics.values(), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQ,
        tie_word_embeddings=True,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        use_cache=False,
    )
    fast.save_pretrained(directory)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def compiled(start: Path, ranks: int, out: Path) -> None:
    """Write the program that trains the model of a directory, and the one that evaluates it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    model.config.use_cache = False
    cluster, ids = autopar.ClusterSpec.local(ranks), torch.zeros(BATCH, SEQ, dtype=torch.long)
    adamw = functools.partial(torch.optim.AdamW, lr=LEARNING_RATE)
    training = autopar.compile(
        model.train(), cluster, {"input_ids": ids, "labels": ids}, optimizer=adamw, options=autopar.Options(seed=SEED)
    )
    print("\n".join(f"  {line}" for line in training.report().splitlines()[:3]))
    training.save(out / "training")
    autopar.compile(model.eval(), cluster, {"input_ids": ids}).save(out / "evaluation")


def torchrun(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    threads = str(max((os.cpu_count() or 1) // ranks, 1))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*command, __file__, "--on-rank", *arguments], check=True, env=environment)


def given_back(start: Path, out: Path) -> None:
    """Export the checkpoint, load it with from_pretrained on one device, evaluate it again, and let it write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from autopar.cli.export import main as export

    paths = [out / "training", out / "checkpoint", out / "model", "--config", start / "config.json"]
    for old in (out / "model").glob("*.safetensors*"):  # of an earlier run of this example
        old.unlink()
    if export([str(path) for path in paths]):
        raise SystemExit("the export failed")
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.save_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    _, held_out = token_rows(tokenizer)
    with torch.no_grad():
        losses = [next_token_loss(model(input_ids=ids).logits, ids) for ids in held_out.split(BATCH)]
    loss = sum(losses) / len(losses)
    print(f"  from_pretrained({str(out / 'model')!r}): evaluation loss {loss:.6f}")
    if not loss < math.log(len(tokenizer)):
        raise SystemExit("the model learned nothing")
    prompt = tokenizer("The function", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(f"  it writes: {tokenizer.decode(written[0])!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory with tokenizer (default: a small Llama)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150, help="in all, those before --resume included")
    parser.add_argument("--out", type=Path, default=Path("out/finetune"))
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    start = args.model or args.out / "start"
    if args.on_rank:
        train(args.out, start, args.steps, args.resume)
        return
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    if not args.resume:
        if args.model is None:
            print(f"1. a small Llama and its tokenizer, in {small_model(start)}")
        print(f"2. compile for {args.ranks} ranks")
        compiled(start, args.ranks, args.out)
    print(f"3. torchrun, {args.ranks} processes")
    given = ["--out", str(args.out), "--steps", str(args.steps), *(["--resume"] if args.resume else [])]
    torchrun(args.ranks, *given, *(["--model", str(args.model)] if args.model else []))
    print("4. back to transformers")
    given_back(start, args.out)


if __name__ == "__main__":
    main()
