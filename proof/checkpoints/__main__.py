"""SmolLM2 in every form in which checkpoints are published computes what the numbers in it mean.

Its matrices are packed into each form, apart from the code that reads them, and stored beside a plain checkpoint with
the numbers that are meant. For each form every weight is the same to the bit, whole and as two ranks read it; logits of
a prompt in one chunk and in several are the same in float32; and a cluster of a prefill and a decode worker answers a
question as one with the plain checkpoint does. Finished forms are kept in --out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.quality.texts import QUESTIONS
from bench.report import ROOT
from proof.checkpoints.packers import CHECKPOINTS
from proof.record import Record, arguments_of
from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tandem.engine.model_config import read_model_config
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.engine.weights import Parameter, TensorPart, TensorSplit, load_weights
from tools.running_cluster import running

TOKENS, CHUNKS, BLOCK = 192, (192, 50), 16
LAYOUT = ("--prefill", "1", "--decode", "1", "--threads", "1", "--disaggregation", "always", "--kv-memory", "64MiB",
          "--max-model-len", "512")  # fmt: skip


def main() -> int:
    parser = arguments_of("checkpoints", __doc__)
    parser.add_argument("--forms", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds after which no form is begun")
    arguments = parser.parse_args()
    record = Record(arguments.out, "checkpoints", {"model": SMOLLM2.name}, is_fresh=arguments.fresh)
    forms: dict[str, dict[str, Any]] = record.content.setdefault("forms", {})
    todo = [form for form in arguments.forms if form not in forms or not forms[form]["is_kept"]]
    ends_s = time.monotonic() + arguments.budget
    if todo:
        with tempfile.TemporaryDirectory(prefix="td-checkpoints-") as name:
            base = Base(pull(SMOLLM2, ROOT / "build" / "models"), Path(name))
            for form in todo:
                if time.monotonic() > ends_s:
                    break
                forms[form] = compared(base, form)
                record.save()
                print(f"{form}: {json.dumps(forms[form])}", flush=True)
    done = [forms[form] for form in arguments.forms if form in forms]
    broken = sum(not one["is_kept"] for one in done)
    return record.verdict(len(done), left=len(arguments.forms) - len(done), broken=broken)


class Base:
    """The published model's numbers in fp32 by transformers' names, and a folder for checkpoints."""

    def __init__(self, file: Path, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        self._folder = folder
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        config.architectures = ["LlamaForCausalLM"]
        build: Any = AutoModelForCausalLM.from_config
        load: Any = load_gguf_checkpoint
        self.tensors: dict[str, Tensor] = load(
            file, return_tensors=True, model_to_load=build(config, dtype=torch.float32)
        )["tensors"]
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        config.save_pretrained(folder)
        self.config = {**json.loads((folder / "config.json").read_text()), "torch_dtype": "float16", "dtype": "float16"}

    def checkpoints(self, form: str) -> tuple[Path, Path, list[str]]:
        """Folders of the packed checkpoint and the plain one, and the names of packed weights."""
        chosen, folders = CHECKPOINTS[form], (self._folder / "packed", self._folder / "plain")
        stored: dict[str, Tensor] = {}
        meant: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if not name.endswith("_proj.weight"):
                stored[name] = meant[name] = tensor.float()
                continue
            parts, meant[name] = chosen.pack(tensor.float())
            stored |= {name.removesuffix("weight") + part: one.contiguous() for part, one in parts.items()}
        for folder, tensors, more in (
            (folders[0], stored, {"quantization_config": chosen.quantization_config}), (folders[1], meant, {}),
        ):  # fmt: skip
            folder.mkdir(exist_ok=True)
            for file in self._folder.glob("*.j*"):
                (folder / file.name).write_bytes(file.read_bytes())
            (folder / "config.json").write_text(json.dumps({**self.config, **more}))
            save_file(
                {name: one.contiguous() for name, one in tensors.items()},
                folder / "model.safetensors",
                {"format": "pt"},
            )
        return folders[0], folders[1], [name for name in meant if name.endswith("_proj.weight")]


def compared(base: Base, form: str) -> dict[str, Any]:
    """The entry of a form."""
    packed, plain, names = base.checkpoints(form)
    different = [name for name in names if not _is_same(packed, plain, name)]
    logits = [[_logits(folder, chunk) for chunk in CHUNKS] for folder in (packed, plain)]
    are_same = all(torch.equal(*both) for both in zip(*logits, strict=True))
    answers = [_answer(folder) for folder in (packed, plain)]
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (packed, plain)]
    return {
        "weights": len(names), "different": different, "are_logits_same": are_same, "answer": answers[0],
        "is_answer_same": answers[0] == answers[1], "of_plain_bytes": round(sizes[0] / sizes[1], 3),
        "is_kept": not different and are_same and answers[0] == answers[1],
    }  # fmt: skip


def _is_same(packed: Path, plain: Path, name: str) -> bool:
    """The weight is that of the plain checkpoint, whole and in two ranks' rows and columns."""
    stored = read_model_config(packed).stored
    from safetensors import safe_open

    with safe_open(str(plain / "model.safetensors"), framework="pt") as file:
        expected = file.get_tensor(name)
    for split, ranks in ((TensorSplit.WHOLE, 1), (TensorSplit.ROWS, 2), (TensorSplit.COLUMNS, 2)):
        shares = []
        for rank in range(ranks):
            part = Parameter.on_meta(
                (TensorPart(key=name, rows=expected.shape[0]),), columns=expected.shape[1], split=split,
                dtype=torch.float32, tp_size=ranks,
            )  # fmt: skip
            load_weights(packed, [part], tp_rank=rank, tp_size=ranks, stored=stored, ignored_prefixes=("",))
            shares.append(part.tensor)
        if not torch.equal(torch.cat(shares, 1 if split is TensorSplit.COLUMNS else 0), expected):
            return False
    return True


def _logits(folder: Path, chunk: int) -> Tensor:
    """Of a prompt's tokens, computed in chunks of so many."""
    runner = ModelRunner(model_dir=folder, dtype="float32", num_blocks=TOKENS // BLOCK, max_model_len=TOKENS)
    ids = [(37 * place * place + 11 * place) % 40_000 + 100 for place in range(TOKENS)]
    found = []
    for first in range(0, TOKENS, chunk):
        last = min(first + chunk, TOKENS)
        slices = [SeqSlice(last - first, last, (range(TOKENS // BLOCK),))]
        found.append(
            runner.forward(StepBatch(ids[first:last], list(range(first, last)), slices, list(range(last - first))))
        )
    return torch.cat(found)


def _answer(folder: Path) -> str:
    with running(*LAYOUT, "--model", str(folder), "--served-model-name", "smollm2", "--dtype", "float32") as cluster:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        status, found = cluster.post(
            "/v1/chat/completions", {"model": "smollm2", "messages": messages, "max_tokens": 24, "temperature": 0}
        )
        assert status == 200, found
        return str(found["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.exit(main())
