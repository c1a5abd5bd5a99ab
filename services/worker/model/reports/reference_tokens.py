"""What transformers' own generate() says, greedily, with the random weights of a worker with `--load-format dummy`.

`{"model": FOLDER, "prompts": [[17, ...], ...], "tokens": 64}` on stdin, a list of tokens for each prompt as one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from kvfleet.worker.model.loader import random_model, read_config
from kvproto.errors import KvfleetError
from kvservice.settings import die


def reference_tokens(folder: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """In float32 on the CPU; the model is as transformers made it. Raises KvfleetError."""
    model = random_model(read_config(folder), torch.float32).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
            found.append(said[0, len(prompt) :].tolist())
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        found = reference_tokens(asked["model"], asked["prompts"], asked["tokens"])
    except KvfleetError as error:
        die(f"kvfleet bench paper: {error}")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
