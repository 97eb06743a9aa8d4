"""Hugging Face `generate` on the same weights and prompts, behind standard input like `upweight_side`; needs torch and transformers.

Run by an interpreter of its own; log-probs are taken as one does there, with `output_scores` and `compute_transition_scores`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from benchmarks.engine.workloads import workload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    for line in sys.stdin:
        name, seed = line.split()
        work = workload(name, int(seed))
        ids = torch.tensor(work.prompts)
        longest = max(work.lengths)
        torch.manual_seed(int(seed))
        began, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=work.top_p,
                max_new_tokens=longest,
                min_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        answer = {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": work.tokens,
            "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
