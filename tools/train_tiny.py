"""Trains ``models/tandem-tiny``, the model Tandem ships for tests and demonstrations.

Makes the corpus from the standard library's docstrings and the Python documentation, trains a byte-level BPE
tokenizer and a small Llama on it with one thread, and writes the model folder. Seeded: the same interpreter,
documentation, torch build and options give the same run. A run that was stopped goes on from its last checkpoint.

The documentation's sources come with Debian's package:

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb build/python-docs
    python tools/train_tiny.py --docs build/python-docs
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from tiny import corpus, export
from tiny import tokenizer as tokens
from tiny.llama import TinyConfig, TinyLlama
from tiny.optimiser import MuonAdamW
from tokenizers import Tokenizer

Tokens = npt.NDArray[np.uint16]

ROOT = Path(__file__).resolve().parent.parent
BATCH_TOKENS = 4096
# (window length, share of the steps): long windows last, so that far positions are not left untrained.
PHASES = ((512, 0.93), (2048, 0.063), (4096, 0.007))
WARMUP_STEPS, STABLE_SHARE = 40, 0.5
# After the steps asked for: the longest windows once more, at a rate high enough to learn the far positions.
FINISH_LENGTH, FINISH_STEPS, FINISH_RATE = 4096, 40, 0.5
PROMPTS = ("The function returns", "This module provides", "Return True if")
QUESTIONS = ("What does os.path.join do?", "Explain json.dumps.", "Hello")


@dataclass(slots=True)
class History:
    """Progress of the run so far, kept in the checkpoint; ``plans`` are (from step, ``--steps`` from there on)."""

    step: int = 0
    seconds: float = 0.0
    plans: list[tuple[int, int]] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    try:
        tokenizer, stream, heldout, summary = _prepare(args)
    except corpus.DocsNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = TinyConfig(vocab_size=tokenizer.get_vocab_size())
    model = TinyLlama(config, args.seed)
    history = _train(args, model, stream, heldout)
    model.eval()
    _export(args, model, tokenizer, history, summary)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="folder with the reST sources of the Python documentation")
    parser.add_argument("--no-docs", action="store_true", help="train on the docstrings alone")
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "tandem-tiny", help="model folder to write")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "train-tiny", help="corpus and checkpoints")
    parser.add_argument("--steps", type=int, default=2400, help=f"steps of {BATCH_TOKENS} tokens (default %(default)s)")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="end there; a later call goes on, with any --steps")
    parser.add_argument("--seed", type=int, default=1, help="of corpus order, initial weights and windows")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate of the matrices (default %(default)s)")
    parser.add_argument("--adam-lr", type=float, default=0.004, help="peak rate of embedding and norms")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--fresh", action="store_true", help="ignore a checkpoint of an earlier run")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    args = parser.parse_args(argv)
    if args.docs is None and not args.no_docs:
        parser.error("--docs DIR is needed (or --no-docs to train on the docstrings alone); see --help")
    return args


def _prepare(args: argparse.Namespace) -> tuple[Tokenizer, Tokens, Tokens, str]:
    """Tokenizer, training stream, held-out stream and a summary, from ``args.work`` when they are already there."""
    work: Path = args.work
    source = f"{'library' if args.no_docs else 'library+docs'}-seed{args.seed}"
    kept = [work / source / n for n in ("tokenizer.json", "train.npy", "heldout.npy", "corpus.txt")]
    kept[0].parent.mkdir(parents=True, exist_ok=True)
    if all(p.exists() for p in kept) and not args.fresh:
        summary = kept[3].read_text(encoding="utf-8")
        print(f"corpus: {summary} (kept in {work})")
        return Tokenizer.from_file(str(kept[0])), np.load(kept[1]), np.load(kept[2]), summary
    made = corpus.build(None if args.no_docs else args.docs, args.seed)
    rendered = [tokens.render_chat(c) for c in made.chats]
    tokenizer = tokens.train(made.texts + rendered, TinyConfig().vocab_size)
    documents = made.texts + rendered
    np.random.default_rng(args.seed).shuffle(documents)
    stream = _encode(tokenizer, documents)
    heldout = _encode(tokenizer, made.heldout_texts)
    summary = f"{made.describe()}; {len(stream) / 1e6:.2f} M tokens"
    tokenizer.save(str(kept[0]), pretty=False)
    np.save(kept[1], stream)
    np.save(kept[2], heldout)
    kept[3].write_text(summary, encoding="utf-8")
    print(f"corpus: {summary}")
    return tokenizer, stream, heldout, summary


def _encode(tokenizer: Tokenizer, documents: list[str]) -> Tokens:
    ids: list[int] = []
    eos = tokenizer.encode(tokens.EOS, add_special_tokens=False).ids
    for encoding in tokenizer.encode_batch(documents):
        ids += encoding.ids
        if ids[-1:] != eos:
            ids += eos
    return np.array(ids, dtype=np.uint16)


def _train(args: argparse.Namespace, model: TinyLlama, stream: Tokens, heldout: Tokens) -> History:
    optimiser = MuonAdamW(model.named_parameters(), muon_lr=args.muon_lr, adam_lr=args.adam_lr, decay=0.05)
    history = History() if args.fresh else _resume(args.work, model, optimiser, args.seed)
    if not history.plans or history.plans[-1][1] != args.steps:
        history.plans.append((history.step, args.steps))
    total = args.steps + FINISH_STEPS
    end = total if args.stop_at is None else min(args.stop_at, total)
    loss_of = torch.compile(model.loss, dynamic=False) if args.compile else model.loss
    recent: list[float] = []
    started, first_step, elapsed_before = time.monotonic(), history.step, history.seconds
    while history.step < end:
        step = history.step
        batch = _batch(stream, step, args.steps, args.seed)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step(step + 1, _schedule(step, args.steps))
        model.zero_grad(set_to_none=True)
        history.step += 1
        recent = [*recent[-19:], float(loss.detach())]
        history.seconds = elapsed_before + time.monotonic() - started
        if history.step % 10 == 0 or history.step == end:
            history.curve.append((history.step, sum(recent) / len(recent)))
            _report(history, total, recent, (time.monotonic() - started) / (history.step - first_step))
        if history.step % args.checkpoint_every == 0 or history.step == end:
            history.heldout.append((history.step, _heldout_loss(model, heldout)))
            print(f"\nheld-out loss {history.heldout[-1][1]:.4f}", flush=True)
            _checkpoint(args.work, model, optimiser, history, args.seed)
    return history


def _batch(stream: Tokens, step: int, steps: int, seed: int) -> torch.Tensor:
    """The windows of ``step``: each pass over the stream visits every window once, from a fresh offset and order."""
    length, start = _phase(step, steps)
    rows = BATCH_TOKENS // length
    windows = (len(stream) - length - 1) // length
    picked = []
    for index in range((step - start) * rows, (step - start + 1) * rows):
        rng = np.random.default_rng([seed, length, index // windows])
        offset = int(rng.integers(length))
        at = int(rng.permutation(windows)[index % windows]) * length + offset
        at = min(at, len(stream) - length - 1)
        picked.append(stream[at : at + length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(picked))


def _phase(step: int, steps: int) -> tuple[int, int]:
    """The window length at ``step`` and the step its phase began at."""
    if step >= steps:
        return FINISH_LENGTH, steps
    start = 0
    for length, share in PHASES[:-1]:
        end = start + round(share * steps)
        if step < end:
            return length, start
        start = end
    return PHASES[-1][0], start


def _steps_by_length(history: History) -> list[tuple[int, int]]:
    """How many steps ran at each window length, shortest first, under whatever plan held at the time."""
    plans = [*history.plans, (history.step, 0)]
    lengths = Counter(_phase(step, steps)[0] for (at, steps), (end, _) in pairwise(plans) for step in range(at, end))
    return sorted(lengths.items())


def _schedule(step: int, steps: int) -> float:
    """Warm-up, stable, linear decay. Before the decay nothing depends on ``steps``: it may still be changed then.

    The finish has a decay of its own.
    """
    if step >= steps:
        return FINISH_RATE * (steps + FINISH_STEPS - step) / FINISH_STEPS
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.01, (steps - step) / ((1 - STABLE_SHARE) * steps)))


def _report(history: History, steps: int, recent: list[float], seconds_a_step: float) -> None:
    left = int(seconds_a_step * (steps - history.step))
    print(
        f"\rstep {history.step}/{steps}  loss {sum(recent) / len(recent):.4f}  "
        f"{BATCH_TOKENS / seconds_a_step:,.0f} tokens/s  ETA {left // 60}:{left % 60:02d} ",
        end="",
        flush=True,
    )


@torch.no_grad()
def _heldout_loss(model: TinyLlama, heldout: Tokens, windows: int = 32, length: int = 512) -> float:
    count = min(windows, (len(heldout) - 1) // length)
    starts = np.linspace(0, len(heldout) - length - 1, count).astype(int)
    total = 0.0
    for at in starts:
        with torch.autocast("cpu", torch.bfloat16):
            total += float(model.loss(torch.from_numpy(heldout[at : at + length + 1].astype(np.int64))[None]))
    return total / count


def _checkpoint(work: Path, model: TinyLlama, optimiser: MuonAdamW, history: History, seed: int) -> None:
    tensors = {f"model:{n}": p.detach() for n, p in model.named_parameters()}
    tensors |= {f"optimiser:{n}": t for n, t in optimiser.state.items()}
    about = asdict(history) | {"seed": seed}
    # One file holds both the tensors and the history, and is renamed into place: a kill leaves the old one whole.
    save_file(tensors, work / "checkpoint.tmp", metadata={"history": json.dumps(about)})
    (work / "checkpoint.tmp").replace(work / "checkpoint.safetensors")


def _resume(work: Path, model: TinyLlama, optimiser: MuonAdamW, seed: int) -> History:
    path = work / "checkpoint.safetensors"
    if not path.exists():
        return History()
    about = _metadata(path)
    if about["seed"] != seed:
        raise SystemExit(f"error: {path} was made with --seed {about['seed']}; pass that, or --fresh to start again")
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model:{name}"])
        for name, state in optimiser.state.items():
            state.copy_(tensors[f"optimiser:{name}"])
    print(f"going on from step {about['step']}")
    return History(
        step=about["step"],
        seconds=about["seconds"],
        curve=[(int(s), float(v)) for s, v in about["curve"]],
        plans=[(int(s), int(n)) for s, n in about["plans"]],
        heldout=[(int(s), float(v)) for s, v in about["heldout"]],
    )


def _metadata(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        return dict(json.loads(opened.metadata()["history"]))


@torch.no_grad()
def _sample(model: TinyLlama, tokenizer: Tokenizer, prompt: str, seed: int, limit: int = 80) -> str:
    generator = torch.Generator().manual_seed(seed)
    eos = tokenizer.token_to_id(tokens.EOS)
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    while len(ids) - start < limit:
        logits = model(torch.tensor([ids]))[0, -1].float()
        chosen = int(torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=generator))
        if chosen == eos:
            break
        ids.append(chosen)
    return str(tokenizer.decode(ids[start:]))


def _export(args: argparse.Namespace, model: TinyLlama, tokenizer: Tokenizer, history: History, summary: str) -> None:
    with torch.no_grad():
        for parameter in model.parameters():  # samples come from the weights that are shipped
            parameter.copy_(parameter.bfloat16().float())
    samples = [(p, p + _sample(model, tokenizer, p, args.seed)) for p in PROMPTS]
    for question in QUESTIONS:
        prompt = tokens.render_chat([{"role": "user", "content": question}]) + f"{tokens.ASSISTANT}\n"
        samples.append((question, _sample(model, tokenizer, prompt, args.seed)))
    parameters = sum(p.numel() for p in model.parameters())
    final = history.curve[-1][1] if history.curve else math.nan
    recipe = (
        f"{history.step:,} steps of {BATCH_TOKENS:,} tokens ({history.step * BATCH_TOKENS / 1e6:.1f} M tokens seen) in "
        f"{history.seconds / 60:.0f} minutes on {args.threads} CPU thread(s), bfloat16 autocast over float32 weights. "
        f"Muon (rate {args.muon_lr:g}) for the matrices of the layers, AdamW (rate {args.adam_lr:g}) for embedding and "
        f"norms, gradients clipped at 1, {WARMUP_STEPS} steps of warm-up, linear decay in the second half. Windows of "
        + ", then ".join(f"{length:,} tokens for {count:,} steps" for length, count in _steps_by_length(history))
        + "."
        + "".join(f" Replanned at step {at:,}: `--steps {steps}` from there on." for at, steps in history.plans[1:])
        + f" The last {FINISH_STEPS} steps decay once more, from {FINISH_RATE:g} of the rate. "
        f"Seed {args.seed}. Last training loss {final:.3f}."
    )
    card = export.Card(
        corpus=summary[0].upper() + summary[1:],
        parameters=parameters,
        recipe=recipe,
        curve=history.curve,
        heldout=history.heldout,
        samples=samples,
    )
    export.write_folder(args.out, model.config, dict(model.named_parameters()), tokenizer, card)
    print(f"wrote {args.out} ({parameters:,} parameters)")
    for prompt, text in samples:
        print(f"--- {prompt}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
