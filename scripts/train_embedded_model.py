"""Trains the embedded look-up model on one CPU core, writes it for transformers, and evaluates it on held-out facts."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from embedded_data import FIRST_BYTE_WEIGHT, Batch, Sampler, attention_mask, predicted
from embedded_eval import ChunkedReader, evaluate
from embedded_export import export
from embedded_model import EmbeddedModel, load_weights
from embedded_muon import Muon
from embedded_phase import Phase
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT_EVERY = 100
LAST = 500
"""Steps of the phase with many keys."""
BARE = 160
"""Steps of the last phase, with bare documents."""


def phase(step: int, steps: int) -> Phase:
    """The phase at this step: easy and short first, then ln R ramped up, then longer, then many similar keys with
    emphasis on the ends of keys, and at last documents that consist almost only of facts.
    """
    if step >= steps - BARE:
        return Phase(2048, 6, 8, 24, 0.05, False, 7.0, bare=0.35, lists=0.25, is_last=True)
    progress = step / (steps - BARE - LAST)
    log_copies = 7 * min(max((progress - 0.24) / 0.25, 0), 1)
    if progress < 0.24:
        return Phase(320, 12, 2, 2, 0.6 if progress < 0.18 else 0.3, progress < 0.18, log_copies)
    if progress < 0.85:
        return Phase(512, 16, 3, 5, 0.1, False, log_copies)
    if progress < 1:
        return Phase(1536, 6, 6, 12, 0.1, False, log_copies)
    return Phase(2048, 6, 8, 24, 0.05, False, log_copies, is_last=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 100 steps, constant, then a linear decay over 50 %; each of the last two phases decays again, from a
    quarter and from a fifth of the peak.
    """
    if step >= steps - BARE:
        return peak * 0.2 * min((step - steps + BARE + 1) / 20, (steps - step) / BARE)
    steps -= BARE
    if step >= steps - LAST:
        return peak * 0.25 * (steps - step) / LAST
    left = (steps - LAST - step) / (0.5 * (steps - LAST))
    return peak * min(1.0, (step + 1) / 100, max(left, 0.02))


def optimizers(model: EmbeddedModel) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices, AdamW for embeddings and norms; both take the same learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    return Muon(matrices, lr=0.0), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)


def loss_of(model: EmbeddedModel, batch: Batch) -> tuple[torch.Tensor, float]:
    """Weighted loss, and the share of values whose first byte is predicted right."""
    rows = predicted(batch)
    logits = model(batch.ids[:, :-1], rows, attention_mask(batch, rows))
    targets, weights = batch.ids[:, 1:].flatten()[rows], batch.weights.flatten()[rows]
    losses = F.cross_entropy(logits, targets, reduction="none")
    first = weights == FIRST_BYTE_WEIGHT
    right = ((logits.argmax(-1) == targets) & first).sum() / first.sum().clamp(min=1)
    return (losses * weights).sum() / weights.sum(), right.item()


class Progress:
    """Prints a line every ten steps, with running means."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.last = time.monotonic()
        self.means: list[float] = []

    def add(self, done: int, loss: float, right: float) -> None:
        """Counts one step; `right` is its share of values found."""
        now, updates = time.monotonic(), [loss, right]
        updates.append(now - self.last)
        self.last = now
        self.means = [0.9 * a + 0.1 * b for a, b in zip(self.means or updates, updates, strict=True)]
        if done % 10 == 0:
            mean_loss, mean_right, seconds = self.means
            left = seconds * (self.steps - done) / 60
            line = f"step {done}/{self.steps} loss {mean_loss:.3f} values found {mean_right:.1%}"
            print(f"{line} {seconds:.2f} s/step, {left:.0f} min left", flush=True)


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    """Replaces the checkpoint in one step, so that an interrupted run leaves a whole one."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def resume(path: Path, model: EmbeddedModel, optimizers: Sequence[torch.optim.Optimizer], sampler: Sampler) -> int:
    """Loads the checkpoint, if there is one; returns how many steps it has made."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    sampler.rng.setstate(state["random"])
    return state["step"]


def train(arguments: argparse.Namespace) -> EmbeddedModel:
    """Runs the steps that the checkpoint does not already hold."""
    torch.manual_seed(arguments.seed)
    sampler, progress = Sampler(arguments.seed), Progress(arguments.steps)
    model = load_weights(arguments.weights) if arguments.weights else EmbeddedModel()
    both = optimizers(model)
    first = resume(arguments.checkpoint, model, both, sampler) or (arguments.steps - BARE if arguments.weights else 0)
    for step in range(first, arguments.steps):
        loss, right = loss_of(model, sampler.batch(phase(step, arguments.steps)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, arguments.steps, arguments.lr)
            optimizer.step()
            optimizer.zero_grad()
        progress.add(step + 1, loss.item(), right)
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == arguments.steps:
            state: dict[str, object] = {"model": model.state_dict(), "random": sampler.rng.getstate(), "step": step + 1}
            state["optimizers"] = [optimizer.state_dict() for optimizer in both]
            save_checkpoint(arguments.checkpoint, state)
            export(model, arguments.out)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2700 + BARE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", type=Path, help="begin the last phase with these, such as model.safetensors")
    parser.add_argument("--lr", type=float, default=4e-3, help="largest learning rate")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "embedded_model.pt", help="resumed from")
    parser.add_argument("--out", type=Path, default=ROOT / "longleaf" / "demo" / "lookup", help="exported here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    model = train(arguments)
    export(model, arguments.out)
    for tokens in (4_000, 16_000, 64_000):
        print(evaluate(lambda text: ChunkedReader(model, text), tokens, documents=4, seed=1000), flush=True)


if __name__ == "__main__":
    main()
