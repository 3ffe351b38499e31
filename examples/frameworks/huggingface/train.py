"""Trains a tiny Llama with a transformers Trainer that comes back from any kill.

The model is made from a config; nothing is downloaded.

python examples/frameworks/huggingface/train.py --folder /tmp/huggingface
torchrun --nproc-per-node 2 examples/frameworks/huggingface/train.py --folder /tmp/huggingface-2
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from tiercheck.integrations.huggingface import Resumable


class Numbers(Dataset):
    """Sequences that count, each from its own place."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * (index % 5 + 1) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class Say(TrainerCallback):
    """One line of JSON for each step."""

    def on_log(self, args, state, control, logs=None, **named) -> None:
        if "loss" in logs and state.is_world_process_zero:
            loss = logs["loss"]
            line = {
                "step": state.global_step,
                "loss": loss,
                "loss_hex": loss.hex(),
                "rate": logs["learning_rate"],
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


class ResumableTrainer(Resumable, Trainer):
    """The only change that TierCheck needs."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny Llama with transformers under TierCheck.")
    parser.add_argument("--folder", default="checkpoints", help="for snapshots outside a cluster")
    parser.add_argument("--every", type=int, help="steps between snapshots; default: as the job says")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_dropout=0.1,  # so that random numbers count
        )
    )
    ResumableTrainer.checkpointing = {"folder": args.folder, "every": args.every}
    trainer = ResumableTrainer(
        model,
        TrainingArguments(
            output_dir=f"{args.folder}/trainer",
            num_train_epochs=args.epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=3,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[Say()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
