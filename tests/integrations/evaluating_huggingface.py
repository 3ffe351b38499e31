"""A Trainer that evaluates in mid-epoch: the metric moves its learning rate, and a patience runs out.

    python evaluating_huggingface.py FOLDER [CHECKPOINT]

CHECKPOINT is one of the Trainer's own that it is told to begin from; without one it writes them:
FOLDER/trainer/checkpoint-4 and others.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tiercheck.integrations.huggingface import Resumable


class MyTrainer(Resumable, Trainer):
    pass


class Say(TrainerCallback):
    """The step before is on disk when the next one is said, so that it is known where a killed life goes
    on.
    """

    trainer: MyTrainer

    def on_step_begin(self, args, state, control, **named) -> None:
        self.trainer.checkpointer.wait()

    def on_log(self, args, state, control, logs=None, **named) -> None:
        if "loss" in logs:
            patience = next(
                each
                for each in self.trainer.callback_handler.callbacks
                if hasattr(each, "early_stopping_patience")
            )
            line = {
                "step": state.global_step, "loss": logs["loss"].hex(), "rate": logs["learning_rate"],
                "waited": patience.early_stopping_patience_counter,
                "evaluations": len([e for e in state.log_history if "eval_loss" in e]),
            }  # fmt: skip
            print(json.dumps(line), flush=True)


def main(folder: str, begin_from: str | None = None) -> None:
    set_seed(0)
    data = [{"input_ids": (t := (torch.arange(12) * (i % 5 + 1) + i) % 64), "labels": t} for i in range(48)]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    MyTrainer.checkpointing = {"folder": folder, "every": 1}
    say = Say()
    trainer = say.trainer = MyTrainer(
        LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1)),
        TrainingArguments(
            output_dir=f"{folder}/trainer",
            num_train_epochs=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="loss",
            greater_is_better=False,
            save_strategy="steps" if begin_from is None else "no",
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data,
        eval_dataset=data[:8],
        # No evaluation is ten better than the first, so from then on each is one that is waited for.
        callbacks=[say, EarlyStoppingCallback(early_stopping_patience=5, early_stopping_threshold=10.0)],
    )
    trainer.train(resume_from_checkpoint=begin_from)


if __name__ == "__main__":
    main(*sys.argv[1:])
