"""Trains the demo model that ships inside the worker: a small Llama that speaks Shakespearean dialogue.

A newcomer without a GPU or a download gets a Hugging Face folder like any other, with real English, turns that end and
contexts long enough for reuse to matter. This file owns the tokenizer, the chat format, the recipe, and the figures in
the model card. It knows nothing of kvfleet.

    python -m kvfleet.worker.model.train_demo_model --data shakespeare.txt --out services/worker/model/demo_model

The text is about 400,000 tokens, so the recipe works against overfitting: residual dropout, BPE dropout, weight decay
and two views of each speech (as the play prints it, and as chat turns). The seed fixes all but BPE dropout, for which
tokenizers has no seed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

logger = logging.getLogger("train_demo_model")

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, EOS, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS
IDS = {token: index for index, token in enumerate(SPECIAL_TOKENS)}  # the trainer numbers them first
# No white space between a turn's end and the next role, so that the ids generated for a turn are exactly those of the
# next request's rendered history, and a cached prefix stays a prefix.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = message['role'] if message['role'] in ['system', 'assistant'] else 'user' %}"
    "{{ '<|' + role + '|>' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

HELD_OUT_FRACTION = 0.1  # the end of the file: whole scenes that training never sees
VOCAB_SIZE = 1024
CONTEXT = 4096
MEASURED_CONTEXT = 2048  # what bits per byte are counted over
TOKENS_PER_STEP = 8192
CONTEXT_UNTIL = ((0.45, 512), (0.9, 2048), (1.0, CONTEXT))  # (share of the steps, tokens): long windows cost more
STEPS = 1000
WARMUP_STEPS = 60
EVALUATE_EVERY = 50
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 3e-3, 3e-3, 0.1
DROPOUT = 0.2
WRITERS = ("embed_tokens", "o_proj", "down_proj")  # to the residual stream
BPE_DROPOUT = 0.1
BPE_DROPOUT_SHARE = 0.7  # of the steps; the last ones see the segmentation that inference uses
CHAT_SHARE = 0.4  # of the windows
REENCODE_EVERY = 50  # steps: about one pass over the text, then new conversations and new segmentations
MAX_SPEECH_BYTES = 220
CARD_MARK = "## Figures"
STOP_WITHIN = 400  # tokens: a chat answer that has not ended by then counts as one that does not end

# First messages, so that words unknown to the plays still draw an answer. None of them is a CHAT_PROMPT.
OPENERS = (
    "Hi", "Hi there!", "Hey", "Good evening!", "Thanks!", "Thank you, that was great.", "ok", "Yes", "No", "test",
    "Who am I talking to?", "What is your name?", "What can you do?", "Can you help me?", "How does this work?",
    "Tell me a joke.", "Tell me something.", "Write a poem about the sea.", "What's the weather like today?",
    "What do you think about computers?", "Explain caching to me.", "Say something nice.", "Why?", "Go on.",
    "What happened next?", "Tell me more.", "Where do you live?", "How old are you?", "Are you a robot?",
    "Write a short story about a dog.", "Give me some advice.", "What should I eat tonight?", "Please continue.",
    "What is 2 + 2?", "Do you like music?", "I am bored.", "I don't understand.", "Sorry, what?", "Goodbye!",
)  # fmt: skip
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are a poet.", "Speak like Shakespeare.")

# One line per conversation of user, assistant, user, ...; a leading "system: " makes a system message.
CHAT_PROMPTS = (
    ["Hello, who are you?"], ["How are you today?"], ["What is the capital of France?"], ["What is love?"],
    ["Tell me a story about a king."], ["Can you write some Python for me?"], ["Where is Romeo?"],
    ["Good morrow, my lord. What news from the court?"], ["Wherefore dost thou weep, sweet lady?"],
    ["My liege, the enemy is at the gates!"], ["Shall I compare thee to a summer's day?"],
    ["Give me your hand, and swear to be true."],
    ["system: You are a helpful assistant.", "Summarise the plot of Hamlet in one paragraph."],
    ["system: You are GLOUCESTER.", "What wouldst thou do to have the crown?"],
    ["system: You are a pirate.", "Where is the treasure buried?"],
    ["Hello!", "Good day to you, sir.", "What shall we do now?"],
    ["Who goes there?", "A friend.", "What friend? Speak thy name.", "My name is Mercutio.", "Then come with me."],
    ["I have a question.", "Ask it, then.", "Is it better to be feared or loved?"],
    ["Your brother is dead.", "O, what a heavy day is this!", "Will you have revenge?"],
    ["Tell me about NATS and key-value caches.", "I know not what thou mean'st.", "Never mind. Sing me a song."],
)  # fmt: skip


def split(text: str) -> tuple[str, str]:
    """Training text and held-out text, cut between two speeches."""
    cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT_FRACTION))) + 2
    return text[:cut], text[cut:]


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any input is encodable. A plain encode prepends BOS only with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"'[a-z]{1,2}\b| ?[^\W\d_]+| ?\d| ?[^\s\w]+|\n+|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    bos = (BOS, IDS[BOS])
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A $B", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=END, pad_token=EOS, chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[EOS, SYSTEM, USER, ASSISTANT], model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def shorten(speech: str) -> str:
    """Cut at the end of a sentence, so that the model learns to finish its sentences."""
    if len(speech.encode()) <= MAX_SPEECH_BYTES:
        return speech
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", speech[:MAX_SPEECH_BYTES])]
    if ends:
        return speech[: ends[-1]]
    return speech[: speech.rfind(" ", 0, MAX_SPEECH_BYTES)].rstrip(" ,;:-") + "."


class Windows:
    """Training windows, cut at random from two streams of token ids: the play as printed, and the play as chat."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self._text, self._tokenizer, self._rng = text, tokenizer, rng
        found = re.finditer(r"(?:^|\n\n)([^\n:]+):\n(.+?)(?=\n\n|\Z)", text, re.DOTALL)
        self._speeches = [(match[1], shorten(match[2].strip())) for match in found]
        self._raw, self._chat = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)

    def reencode(self, bpe_dropout: float) -> None:
        """Draw both streams anew; `bpe_dropout` is the chance that a merge is skipped."""
        backend = self._tokenizer.backend_tokenizer
        backend.model.dropout = bpe_dropout or None
        self._raw = encode(backend, self._text)
        self._chat = encode(backend, "".join(self._conversations()))
        backend.model.dropout = None

    def _conversations(self) -> Iterator[str]:
        """Runs of neighbouring speeches, every second one an answer; line breaks stay in the answers only."""
        at = self._rng.randrange(8)
        while at < len(self._speeches) - 2:
            turns = self._speeches[at : at + 2 * self._rng.choice((1, 1, 2, 3, 4, 6, 8, 16))]
            at += len(turns)
            messages: list[dict[str, str]] = []
            chance = self._rng.random()
            if chance < 0.25:
                messages.append({"role": "system", "content": f"You are {turns[min(1, len(turns) - 1)][0]}."})
            elif chance < 0.5:
                messages.append({"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)})
            for index, (_, speech) in enumerate(turns):
                if index % 2:
                    messages.append({"role": "assistant", "content": speech})
                else:
                    opener = self._rng.random() < 0.12
                    content = self._rng.choice(OPENERS) if opener else speech.replace("\n", " ")
                    messages.append({"role": "user", "content": content})
            yield f"{self._tokenizer.apply_chat_template(messages, tokenize=False)}{EOS}"

    def sample(self, length: int) -> Tensor:
        """A batch of int64[TOKENS_PER_STEP // length, length]."""
        rows = []
        for _ in range(TOKENS_PER_STEP // length):
            is_chat = self._rng.random() < CHAT_SHARE
            stream = self._chat if is_chat else self._raw
            at = self._rng.randrange(len(stream) - length)
            rows.append(stream[at : at + length] if is_chat else after_bos(stream[at : at + length - 1]))
        return torch.stack(rows)


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """Without a BOS before it."""
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)


def after_bos(ids: Tensor) -> Tensor:
    """int64[..., n] -> int64[..., n + 1]"""
    return nn.functional.pad(ids, (1, 0), value=IDS[BOS])


def build_model() -> LlamaForCausalLM:
    """Untrained, 12 MB in float16; few heads of 64, which suit CPU attention kernels."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, dtype="float32",
        bos_token_id=IDS[BOS], eos_token_id=[IDS[END], IDS[EOS]], pad_token_id=IDS[EOS],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, module in model.named_modules():
        if name.endswith(WRITERS):
            module.register_forward_hook(drop)
            if isinstance(module, nn.Linear):  # start small (GPT-2, section 2.3)
                module.weight.data /= math.sqrt(2 * config.num_hidden_layers)
    return model


def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
    """Drop what enters the residual stream, as GPT-2 does; Hugging Face's Llama drops attention weights only."""
    return nn.functional.dropout(output, DROPOUT, module.training)


def token_losses(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Nats for each predicted token: [n, length] -> [n, length - 1]."""
    losses = []
    with torch.inference_mode():
        for batch in torch.split(windows, 2):
            logits = model(input_ids=batch).logits[:, :-1].float()
            losses.append(nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none"))
    return torch.cat(losses)


def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str) -> float:
    """Over all of `text`, in windows of MEASURED_CONTEXT tokens that each start with BOS; each byte counts once."""
    model.eval()
    pieces = torch.split(encode(tokenizer, text), MEASURED_CONTEXT - 1)
    nats = sum(float(token_losses(model, after_bos(piece)[None]).sum()) for piece in pieces)
    return nats / math.log(2) / len(text.encode())


def loss_by_position(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str) -> dict[str, float]:
    """Nats per token at ranges of positions. Windows start every 256 tokens; only tokens that occur at every multiple
    of 256 count, so that all ranges are measured on the same tokens."""
    windows = after_bos(encode(tokenizer, text).unfold(0, CONTEXT - 1, 256))
    losses = token_losses(model, windows)  # [window, position]: token 256 * window + position
    losses = nn.functional.pad(losses, (0, 1), value=math.nan)  # the last position predicts nothing
    blocks = losses.view(len(windows), CONTEXT // 256, 256)
    last = CONTEXT // 256 - 1
    same_tokens = torch.stack([blocks[last - at : len(windows) - at, at] for at in range(last + 1)])
    means = same_tokens[:, :, :-1].mean(dim=(1, 2))
    ranges = ((0, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 4096))
    return {f"{low}-{high - 1}": round(float(means[low // 256 : high // 256].mean()), 4) for low, high in ranges}


def messages_of(prompt: list[str]) -> list[dict[str, str]]:
    first = ("system",) if prompt[0].startswith("system: ") else ()
    roles = itertools.chain(first, itertools.cycle(("user", "assistant")))
    return [{"role": role, "content": text.removeprefix("system: ")} for role, text in zip(roles, prompt, strict=False)]


def chat_endings(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, int], list[str]]:
    """How many CHAT_PROMPTS are answered with a stop token in time, sampled and greedily; and the sampled answers."""
    ended, answers = {"greedy": 0, "sampled": 0}, []
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    for kind, options in (("greedy", {"do_sample": False}), ("sampled", sampling)):
        torch.manual_seed(0)
        for prompt in CHAT_PROMPTS:
            asked = tokenizer.apply_chat_template(messages_of(prompt), add_generation_prompt=True, return_tensors="pt")
            ids = asked["input_ids"]
            output = model.generate(ids, max_new_tokens=STOP_WITHIN, **options)[0, ids.shape[1] :]
            ended[kind] += int(output[-1]) in (IDS[END], IDS[EOS])
            if kind == "sampled":
                answers.append(tokenizer.decode(output, skip_special_tokens=True))
    return ended, answers


def evaluate(folder: Path, train_text: str, held_out: str) -> tuple[dict[str, Any], list[str]]:
    """The figures of the model as a user gets it: read back from the folder, weights rounded to float16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer.backend_tokenizer
    ended, answers = chat_endings(model, tokenizer)
    figures = {
        "parameters": model.num_parameters(),
        "safetensors_bytes": (folder / "model.safetensors").stat().st_size,
        "held_out_bytes": len(held_out.encode()),
        "bytes_per_token": round(len(held_out.encode()) / len(encode(plain, held_out)), 3),
        "held_out_bits_per_byte": round(bits_per_byte(model, plain, held_out), 4),
        "train_bits_per_byte": round(bits_per_byte(model, plain, train_text[: len(held_out)]), 4),
        "held_out_nats_per_token_by_position": loss_by_position(model, plain, held_out),
        "chat_prompts": len(CHAT_PROMPTS),
        "chat_prompts_ended": ended,
    }
    return figures, answers


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """A folder that transformers and tokenizers load. Stored as float16, computed in float32 by its config."""
    stored = copy.deepcopy(model).half()
    stored.generation_config.update(do_sample=True, temperature=0.8, top_p=0.95, max_length=None)
    stored.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    tokenizer.save_pretrained(out)


def train(train_text: str, held_out: str, out: Path, steps: int, seed: int) -> float:
    """Keeps in `out` the export with the lowest held-out loss so far. Returns the minutes it took."""
    torch.manual_seed(seed)
    started = time.monotonic()
    tokenizer = train_tokenizer(train_text)
    windows = Windows(train_text, tokenizer, random.Random(seed))
    model = build_model()
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    )
    fall = max(steps - WARMUP_STEPS, 1)
    rates = [LambdaLR(one, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / fall)) for one in optimizers]
    best, smooth = math.inf, math.nan
    with tqdm(total=steps) as progress:
        for step in range(steps):
            if step % REENCODE_EVERY == 0:
                windows.reencode(BPE_DROPOUT if step < steps * BPE_DROPOUT_SHARE else 0.0)
            batch = windows.sample(next(length for share, length in CONTEXT_UNTIL if step < steps * share))
            model.train()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
            smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
            progress.set_description(f"loss {smooth:.3f}, held out {best:.4f} bits/byte")
            progress.update()
            if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
                with torch.autocast("cpu", torch.bfloat16):
                    measured = bits_per_byte(model, tokenizer.backend_tokenizer, held_out)
                logger.info("step %d loss %.4f held-out bits/byte %.4f", step + 1, smooth, measured)
                if measured < best:
                    best = measured
                    export(model, tokenizer, out)
    return (time.monotonic() - started) / 60


def write_card(folder: Path, run: str, figures: dict[str, Any], answers: list[str]) -> None:
    """Write the figures below CARD_MARK in the folder's README; the prose above stays."""
    card = folder / "README.md"
    prose = card.read_text(encoding="utf-8").partition(CARD_MARK)[0] if card.exists() else ""
    samples = [f"**{turns[-1]}**\n\n{answer}" for turns, answer in zip(CHAT_PROMPTS[:8], answers, strict=False)]
    quoted = "\n\n".join("> " + sample.replace("\n", "  \n> ") for sample in samples)
    measured = (
        f"```json\n{json.dumps(figures, indent=2)}\n```\n\nFirst answers at temperature 0.8, top-p 0.95:\n\n{quoted}\n"
    )
    card.write_text(f"{prose}{CARD_MARK}\n\n{run}\n\n{measured}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the text of the plays")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write, or to evaluate")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--evaluate-only", action="store_true", help="print the figures of the folder as it is")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)

    texts = split(options.data.read_text(encoding="utf-8"))
    if options.evaluate_only:
        figures, _ = evaluate(options.out, *texts)
    else:
        minutes = train(*texts, options.out, options.steps, options.seed)
        figures, answers = evaluate(options.out, *texts)
        run = f"{options.steps} steps, seed {options.seed}, {minutes:.0f} minutes on {options.threads} CPU threads."
        write_card(options.out, run, figures, answers)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
