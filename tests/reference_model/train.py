#!/usr/bin/env python3
"""Train the reference model on one GPU for a given time, and write the checkpoint: `train.py --minutes 6 --out DIR`.

Needs torch, numpy, safetensors and jinja2. Everything follows the clock: the learning rate, the length of the texts,
the checkpoints. Files in DIR: the checkpoint as transformers and vLLM read it, log.jsonl (a line every few seconds),
evaluation.json (held-out dialogues, at the end).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import reference_parts
import torch
from reference_batches import Batch, training_batches
from reference_config import CONFIG, WEIGHTS, write_files
from reference_net import Network, Places, Weights, init_weights
from reference_rows import PROMPT, REPLY, held_out, judged
from reference_score import passes, score
from safetensors.torch import load_file, save_file
from torch import Tensor

LONGEST_TEXT = 8600
"""Characters; 8 x 1024 tokens of text and the question fit into the longest row."""
PROMPT_WEIGHT = 0.1
DRAFT_WEIGHTS = (0.3, 0.15, 0.1)
"""Of the loss of each MTP step, where the model's counts 1."""
BALANCE_WEIGHT = 0.01
WARM_UP, DECAY_FROM = 0.02, 0.4
"""Shares of the time: until the full learning rate, and from where on it falls to nothing."""
SHORT_TEXTS_UNTIL, SHORT_TEXT = 0.15, 1500


class Muon:
    """Momentum, orthogonalized (Jordan et al., Muon, 2024), for the matrices; matrices of one shape go together."""

    def __init__(self, parameters: list[torch.nn.Parameter], rate: float) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(by_shape.values())
        self.momenta = [torch.zeros((len(group), *group[0].shape), device=group[0].device) for group in self.groups]
        self.rate = rate

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, factor: float) -> None:
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            momentum.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            rate = self.rate * factor * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - 0.02 * self.rate * factor)
                parameter.sub_(change.to(parameter.dtype), alpha=rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about U V^T of each matrix U S V^T, by five steps of a quintic Newton-Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon for the matrices inside, AdamW for embeddings, head, routers, convolutions and vectors."""

    def __init__(self, network: Network, rate: float) -> None:
        inside: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in network.parameters_by_name.items():
            outer = any(
                part in name for part in ("embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate", "in_proj_ba")
            )
            (rest if outer or parameter.dim() != 2 else inside).append(parameter)
        self.muon = Muon(inside, rate)
        self.adam_rate = rate * 0.15
        self.adam = torch.optim.AdamW(rest, lr=self.adam_rate, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0)
        self.everything = [*inside, *rest]

    def step(self, factor: float) -> float:
        """Apply the gradients, and return their norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.everything, 1.0)
        if torch.isfinite(norm):
            for group in self.adam.param_groups:
                group["lr"] = self.adam_rate * factor
            self.adam.step()
            self.muon.step(factor)
        for parameter in self.everything:
            parameter.grad = None
        return float(norm)


def rate_factor(elapsed: float) -> float:
    """Return the learning rate's factor at a share of the time."""
    if elapsed < WARM_UP:
        return max(elapsed / WARM_UP, 0.02)
    return min(1.0, max(0.0, 1.0 - elapsed) / (1.0 - DECAY_FROM))


class Data:
    """Processes that draw training batches."""

    def __init__(self, seed: int, workers: int, longest_text: int) -> None:
        context = multiprocessing.get_context("fork")
        self.longest_text = context.Value("i", longest_text, lock=False)
        self.queue: Any = context.Queue(maxsize=4 * workers)
        self.workers = [
            context.Process(target=_work, args=(f"{seed} {worker}", self.longest_text, self.queue), daemon=True)
            for worker in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.queue.get(timeout=120)

    def stop(self) -> None:
        for worker in self.workers:
            worker.terminate()


def _work(seed: str, longest_text: Any, queue: Any) -> None:
    os.nice(5)
    for one in training_batches(seed, longest_text):
        queue.put(one)


def loss_of(network: Network, one: Batch, device: str) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch, and its parts: of the model, then of each MTP step, per token of a reply."""
    tokens = torch.from_numpy(one.tokens).to(device, non_blocking=True).long()
    parts = torch.from_numpy(one.parts).to(device, non_blocking=True)
    weight = (parts == REPLY).float() + PROMPT_WEIGHT * (parts == PROMPT)
    places = Places(network.config, tokens.shape[0], tokens.shape[1], device)
    total, seen = torch.zeros((), device=device), []
    count = weight.sum()
    for share, (loss, _, balance) in zip((1.0, *DRAFT_WEIGHTS), passes(network, tokens, weight, places), strict=True):
        total = total + share * loss / count + share * BALANCE_WEIGHT * balance
        seen.append((loss / count).detach())
    return total, torch.stack(seen)


def export(network: Network, folder: Path) -> None:
    """Write the checkpoint in bfloat16; an interrupted write leaves the one before."""
    write_files(folder)
    if folder != WEIGHTS:
        shutil.copy(WEIGHTS / "chat_template.jinja", folder)
    weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in network.parameters_by_name.items()}
    save_file(weights, folder / "model.safetensors.part", {"format": "pt"})
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")


def rounded(network: Network) -> Network:
    """The network with the weights that are exported."""
    weights = {name: weight.detach().bfloat16().float() for name, weight in network.parameters_by_name.items()}
    return Network(network.config, weights)


def read_weights(folder: Path) -> Weights:
    return {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}


def try_compiling(network: Network, one: Batch, device: str) -> None:
    """Compile the parts, and go on without when that fails on this machine."""
    reference_parts.compile_parts = True
    try:
        with torch.autocast(device, torch.bfloat16):
            loss_of(network, one, device)[0].backward()
    except Exception:  # noqa: BLE001 - whatever a compiler raises, training goes on uncompiled
        traceback.print_exc()
        reference_parts.compile_parts = False
    for parameter in network.parameters():
        parameter.grad = None


def train(options: argparse.Namespace) -> None:
    """Train until the time is over; the last checkpoint and its evaluation are written after it."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Data(options.seed, options.workers, SHORT_TEXT if options.resume is None else LONGEST_TEXT)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(options.seed)
    weights = init_weights(CONFIG, generator) if options.resume is None else read_weights(Path(options.resume))
    network = Network(CONFIG, weights).to(device)
    optimizer = Optimizer(network, options.rate)
    batches = iter(data)
    started = time.monotonic()
    if options.compile:
        try_compiling(network, next(batches), device)
    print(f"ready after {time.monotonic() - started:.1f} s, compiled: {reference_parts.compile_parts}", flush=True)
    watched = judged("held-out", "watched", 12, (500, 2000, 8000))
    trained = time.monotonic()
    length = 60 * options.minutes - (trained - started)
    next_log, next_check, step, tokens = 0.0, 60.0, 0, 0
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:

        def note(**entry: Any) -> None:
            print(json.dumps(entry), file=log, flush=True)
            print(json.dumps(entry), flush=True)

        for one in batches:
            elapsed = time.monotonic() - trained
            if elapsed >= length:
                break
            if elapsed / length >= SHORT_TEXTS_UNTIL:
                data.longest_text.value = LONGEST_TEXT
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, seen = loss_of(network, one, device)
            loss.backward()
            norm = optimizer.step(rate_factor(elapsed / length))
            step, tokens = step + 1, tokens + int(numpy.count_nonzero(one.parts))
            if elapsed >= next_log:
                next_log = elapsed + options.log_every
                losses = [round(value, 5) for value in seen.tolist()]
                memory = torch.cuda.max_memory_allocated() >> 20 if device == "cuda" else 0
                note(s=round(elapsed, 1), step=step, tokens=tokens, losses=losses, norm=round(norm, 4),
                     length=one.tokens.shape[1], waiting=data.queue.qsize(), gpu_mib=memory)  # fmt: skip
            if elapsed >= next_check:
                next_check = elapsed + 60
                export(network, out)
                try:
                    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                        note(s=round(elapsed, 1), step=step, held_out=score(network, watched, device))
                except RuntimeError as error:
                    note(s=round(elapsed, 1), step=step, not_scored=str(error))
        data.stop()
        export(network, out)
        evaluate(rounded(network), out, device, {"steps": step, "tokens": tokens, "seconds": round(length, 1)})


def evaluate(network: Network, out: Path, device: str, facts: dict[str, Any]) -> None:
    """Score the exported weights on held-out dialogues and needles, and write evaluation.json."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        result = score(network, held_out(), device)
    report = {**facts, "torch": torch.__version__, "device": device, **result}
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, compilation included")
    parser.add_argument("--out", required=True, help="folder for the checkpoint, log.jsonl and evaluation.json")
    parser.add_argument("--resume", help="folder with model.safetensors to go on from")
    parser.add_argument("--rate", type=float, default=0.02, help="Muon's learning rate; AdamW's is a fraction of it")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) - 4)))
    parser.add_argument("--log-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--evaluate-only", action="store_true", help="score the weights in --resume")
    options = parser.parse_args()
    if options.evaluate_only:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        network = Network(CONFIG, read_weights(Path(options.resume))).to(device)
        evaluate(network, Path(options.out), device, {"weights": options.resume})
        return
    train(options)


if __name__ == "__main__":
    main()
