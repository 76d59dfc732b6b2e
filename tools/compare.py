"""Compare the gradients of objectives on the same completions: in which direction would each of them move the weights?

    python -m tools.compare                                       every preset, at the policy that sampled
    python -m tools.compare --updates 8 --learning_rate 5e-4      and after eight updates on these completions
    python -m tools.compare --vary normalization=sequence,global --seeds 1,2,3

All other flags are those of train.py. One rollout is made for each seed. For each variant, the table shows the norm of
its gradient and the cosine to the first variant. Variants whose cosine is 1.000 are one class. With several seeds,
numbers are means, with the lowest and the highest. `--picture FILE` draws the cosines of all pairs.

A model may be too large to keep the gradients of all variants. Then `--coordinates N` keeps the same N random entries
of each. Norms stay exact. The error of the cosines is estimated from ten parts of these entries.

Gradients are those that `update` gives to the optimizer, without clipping by --max_grad_norm. Dynamic sampling, whose
groups depend on the preset, is not made. Left out: several processes.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from advantage import Group, set_advantages
from batch import Batch, collate, retry_smaller
from config import ALGORITHMS, SETTINGS, Config, needs
from infra import faults, ranks
from infra.command_line import parse, ready
from infra.lora import trained_tensors

ON_GPU = torch.cuda.is_available()
SAME = 0.9995  # a cosine from here on is shown as 1.000
# All variants have the same completions, rewards and reference, so what only these depend on cannot be varied.
SHARED = "reference ref_sync_every overlong_buffer dynamic_sampling".split()
AT_ONCE = 200_000_000  # how many numbers are kept, for all variants together, if --coordinates is not given


def variants_of(words: list[str], vary: str) -> dict[str, Config]:
    """Return the settings of each variant by its name. The first one is what the others are compared with."""
    name, _, values = vary.partition("=")
    return {value: ready(parse([*words, f"--{name}", value], ON_GPU), ON_GPU) for value in values.split(",")}


def batch_of(run: train.Run, config: Config, groups: list[Group], fixed: Batch) -> Batch:
    """Return the batch of these completions with the advantages of a variant, and the log-probs of `fixed`."""
    run.config = replace(config, max_grad_norm=sys.float_info.max)
    set_advantages(groups, run.task.weights, config)
    batch = collate(groups, config.mask_truncated, run.device)
    if batch.head_ids is not None:  # they are as many as any variant needs; a head without ids centers nothing
        K = min(config.score_centering, batch.head_ids.shape[2])
        others = batch.sampler_head_logp[..., K:].logsumexp(-1, keepdim=True)
        batch.sampler_head_logp = torch.cat([batch.sampler_head_logp[..., :K], others], -1)
        batch.head_ids = batch.head_ids[..., :K]
    return replace(batch, old_logp=fixed.old_logp, ref_logp=fixed.ref_logp, entropy=fixed.entropy)


def gradient(run: train.Run, batch: Batch, coordinates: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    """Return what `update` gives to an optimizer, and its norm. The weights stay as they are."""
    weights = [*trained_tensors(run.model).values()]
    own, seen = run.optimizer, [torch.zeros(sum(p.numel() for p in weights))]  # if it trains on nothing
    run.optimizer = torch.optim.SGD(weights, lr=0.0)
    run.optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in weights])))
    _, norm, _ = train.update(run, batch, step=run.config.warmup_steps + 1)
    run.optimizer = own
    return (seen[-1] if coordinates is None else seen[-1][coordinates]).double().cpu(), float(norm)


def measure(variants: dict[str, Config], updates: int, kept: int | None) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return the norms (V,), the cosines (V, V) and their error, before and, if there are any, after the updates."""
    first = next(iter(variants.values()))
    # Old log-probs are computed where there are several updates, and entropies where they choose tokens. There are a
    # reference and heads if any variant needs them.
    most = {name: max(getattr(config, name) for config in variants.values()) for name in ("beta", "score_centering")}
    config = replace(first, num_iterations=2, top_entropy=0.5, dynamic_sampling=0, shard=False, **most)
    run, *_ = train.set_up(config, ranks.start(shard=False))
    groups, _ = train.finish_sampling(run, 1, 1, train.start_sampling(run, 1))
    set_advantages(groups, run.task.weights, first)
    fixed = collate(groups, False, run.device)
    retry_smaller(train.score_before_updates, run, fixed)
    size = sum(p.numel() for p in trained_tensors(run.model).values())
    kept = kept or AT_ONCE // len(variants)
    coordinates = torch.randint(size, (kept,), generator=torch.Generator().manual_seed(0)) if kept < size else None

    found = []
    for n in (0, updates) if updates else (0,):
        for _ in range(n):
            train.update(run, batch_of(run, first, groups, fixed), step=first.warmup_steps + 1)
        batches = (batch_of(run, config, groups, fixed) for config in variants.values())
        gradients, norms = zip(*(gradient(run, batch, coordinates) for batch in batches))
        stacked = torch.stack(gradients)  # (V, D)
        parts = np.stack([cosines(part) for part in stacked.chunk(10, dim=1)])
        error = 0.0 if coordinates is None else float((parts.std(0, ddof=1) / np.sqrt(len(parts))).max())
        found.append((np.array(norms), cosines(stacked), error))
    return found


def cosines(gradients: torch.Tensor) -> np.ndarray:
    directions = gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return (directions @ directions.T).numpy()


def classes(cosines: np.ndarray) -> list[np.ndarray]:
    """Return the variants of each direction."""
    same = (cosines >= SAME) | np.eye(len(cosines), dtype=bool)  # without a gradient, even the cosine to itself is 0
    first = same.argmax(axis=1)  # for each variant, the first one that has its direction
    return [np.flatnonzero(first == i) for i in np.unique(first)]


def table(names: list[str], norms: np.ndarray, matrices: np.ndarray) -> list[str]:
    """Return the lines of a table, from the norms (seeds, V) and the cosines (seeds, V, V)."""
    mean = matrices.mean(0)
    lines = [f"{'variant':24} {'norm':>9}  cosine to {names[0]}"]
    for i, name in enumerate(names):
        low, high = matrices[:, 0, i].min(), matrices[:, 0, i].max()
        spread = f" ({low:.3f} to {high:.3f})" if len(matrices) > 1 else ""
        lines.append(f"{name:24} {norms[:, i].mean():9.4g}  {mean[0, i]:.3f}{spread}")
    directions = [" = ".join(names[i] for i in own) for own in classes(mean)]
    return [*lines, f"{len(directions)} directions: {'; '.join(directions)}"]


def picture(names: list[str], titled: dict[str, np.ndarray]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.3 * len(names) * len(titled) + 2, 0.3 * len(names) + 1.2), layout="constrained")
    order = np.concatenate(classes(next(iter(titled.values()))))  # variants of one direction stand together
    for k, (title, matrix) in enumerate(titled.items()):
        axes = figure.add_subplot(1, len(titled), k + 1)
        image = axes.imshow(matrix[np.ix_(order, order)], vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set_xticks(range(len(names)), [names[i] for i in order], rotation=90)
        axes.set_yticks(range(len(names)), [names[i] for i in order] if k == 0 else [])
        axes.set_title(title)
    figure.colorbar(image, ax=figure.axes, label="cosine", shrink=0.8)
    return figure


def split(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this tool, and those of train.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=0, help="compare again after this many by the first variant")
    parser.add_argument("--vary", action="append", metavar="SETTING=VALUE,VALUE", help="default: every preset")
    parser.add_argument("--seeds", default="0", help="default: %(default)s")
    parser.add_argument("--coordinates", type=int, metavar="N", help="keep N random entries of each gradient")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the cosines of all pairs")
    args, flags = parser.parse_known_args(words)
    args.vary, *others = args.vary or [f"algorithm={','.join(ALGORITHMS)}"]
    name, _, _ = args.vary.partition("=")
    if others or name not in SETTINGS or SETTINGS[name].metadata["heading"] != "The objective" or name in SHARED:
        parser.error(f"--vary {name}: must be one setting of the objective, and none of {', '.join(SHARED)}")
    return args, flags


def main(words: list[str]) -> int:
    args, flags = split(words)
    args.grids = [variants_of([*flags, "--seed", seed], args.vary) for seed in args.seeds.split(",")]
    return faults.run_to_the_end(lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    if args.picture:
        needs("matplotlib")  # found now, and not after the work
    found = [measure(variants, args.updates, args.coordinates) for variants in args.grids]
    names, titled = [*args.grids[0]], {}
    for phase, title in enumerate(["at the policy that sampled", f"after {args.updates} updates"][: len(found[0])]):
        norms, matrices, errors = zip(*(of_seed[phase] for of_seed in found))
        titled[title] = np.stack(matrices).mean(0)
        error = f"; cosines have an error of {max(errors):.2g}" if max(errors) else ""
        print(f"{title}{error}", *table(names, np.stack(norms), np.stack(matrices)), "", sep="\n")
    if args.picture:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        picture(names, titled).savefig(args.picture, dpi=160, bbox_inches="tight")
        print(args.picture)
    return 0


if __name__ == "__main__":
    faults.leave(main(sys.argv[1:]))
