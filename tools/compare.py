"""Compare the gradients of objectives on the same completions: their directions and their sizes.

    python -m tools.compare                                                 all presets, on the default task
    python -m tools.compare --updates 8 --picture compare.png               also after eight updates
    python -m tools.compare --vary normalization=sequence,global --seeds 1,2,3 --beta 0.04

Takes the flags of train.py. The rollout and the updates are those of the run that these flags describe, at its full
learning rate. The table shows the cosine of every pair of gradients, and the norm of each gradient before clipping. With
--seeds, it shows the means over the seeds and their 95 % intervals (Student's t). If the model has more weights than
--coordinates, cosines are estimated from that many weights, drawn by --seed, and their standard errors are shown. Norms
are always exact. Nothing is written but the picture.
"""

import argparse
import itertools
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import train
from advantage import Group, has_signal, on_high_entropy, set_advantages
from batch import Batch, collate
from config import ALGORITHMS, SETTINGS, Config, UserError
from infra import command_line, ranks, seeds
from loss import token_weights

BLOCKS = 20  # of coordinates; leaving out one at a time gives the standard error of a cosine
T_95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]  # Student's t for 1 to 9 degrees of freedom


def variants_of(typed: Config, words: list[str], vary: list[str]) -> dict[str, Config]:
    """Return the settings of each variant by its name: the presets, or the grid of --vary."""
    on_gpu = torch.cuda.is_available()
    grid = [[(name, value) for value in values.split(",")] for name, _, values in (x.partition("=") for x in vary)]
    for name, _ in itertools.chain(*grid):
        if name not in SETTINGS or SETTINGS[name].metadata["heading"] != "The objective":
            raise UserError(f"--vary {name}: not a setting of the objective, so the completions could not be the same")
    if grid:
        configs = {}
        for chosen in itertools.product(*grid):
            flags = [word for name, value in chosen for word in (f"--{name}", value)]
            label = ",".join(value for _, value in chosen)
            configs[label] = command_line.ready(command_line.parse([*words, *flags], on_gpu), on_gpu)
        return configs
    configs = {}
    for name in ALGORITHMS:
        try:
            configs[name] = command_line.ready(replace(typed, algorithm=name), on_gpu)
        except UserError as error:
            print(f"left out: {name}: {error}")
    return configs


def batch_for(run: train.Run, groups: list[Group], cfg: Config, fixed: Batch | None = None) -> Batch:
    """Return the completions with the advantages of these settings, and the log-probs of the policies in `fixed`."""
    for group in groups:
        group.has_signal = has_signal(group, cfg.mask_truncated, run.task.graded)
    set_advantages(groups, run.task.weights, cfg)
    batch = collate(groups, cfg.mask_truncated, run.device)
    if fixed is not None:
        batch.old_logp, batch.ref_logp, batch.entropy = fixed.old_logp, fixed.ref_logp, fixed.entropy
    return batch


def gradient(run: train.Run, batch: Batch, cfg: Config, chosen: list[Tensor]) -> tuple[Tensor, float]:
    """Return the chosen coordinates of the gradient, and the norm of the whole gradient."""
    run.config = cfg
    batch.weights = token_weights(batch.mask, cfg.normalization, cfg.max_completion_length, batch.prompts)
    if cfg.top_entropy < 1.0:
        batch.advantages = on_high_entropy(batch.advantages, batch.entropy, batch.mask, cfg.top_entropy)
    train.accumulate(run, batch)
    weights = [p for p in run.model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    part = torch.cat([g.flatten()[index].double().cpu() for g, index in zip(grads, chosen, strict=True)])
    norm = torch.stack([g.double().norm() for g in grads]).norm().item()
    run.optimizer.zero_grad()
    return part, norm


def coordinates(run: train.Run, limit: int, seed: int) -> list[Tensor]:
    """Draw `limit` of all trained weights. Return the indices in each parameter."""
    sizes = [p.numel() for p in run.model.parameters() if p.requires_grad]
    if sum(sizes) <= limit:
        return [torch.arange(n) for n in sizes]
    drawn = np.sort(np.random.default_rng(seed).choice(sum(sizes), limit, replace=False, shuffle=False))
    starts = np.cumsum([0, *sizes])
    return [torch.from_numpy(drawn[(drawn >= a) & (drawn < b)] - a) for a, b in itertools.pairwise(starts)]


def cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    return unit @ unit.T


def standard_error(rows: Tensor, seed: int) -> float:
    """Return the largest standard error of a cosine, by the jackknife over blocks of coordinates."""
    block = torch.from_numpy(np.random.default_rng(seed + 1).integers(BLOCKS, size=rows.shape[1]))
    without = torch.stack([cosines(rows[:, block != k]) for k in range(BLOCKS)])
    return ((BLOCKS - 1) * without.var(0, correction=0)).sqrt().max().item()


def measure(cfg: Config, variants: dict[str, Config], updates: int, limit: int) -> list[tuple[Tensor, Tensor, float]]:
    """Return the cosines, the norms and the largest standard error, before the updates and after them."""
    loaded = replace(cfg, beta=max(x.beta for x in [cfg, *variants.values()]))  # a variant may need the reference
    run, _, _ = train.set_up(loaded, ranks.start(False))
    cfg = replace(run.config, beta=cfg.beta)  # on a GPU, with the measured budgets
    run.config, run.progress = cfg, None
    seeds.seed_everything(cfg.seed, 1)
    groups, _ = train.draw_groups(run, 1)
    # More than one update and a share of tokens, so that all log-probs and entropies are computed.
    run.config = replace(cfg, num_iterations=2, top_entropy=0.5, old_policy="policy")
    fixed = batch_for(run, groups, cfg)
    train.score_fixed_policies(run, fixed)
    chosen = coordinates(run, limit, cfg.seed)

    def measured() -> tuple[Tensor, Tensor, float]:
        pairs = [gradient(run, batch_for(run, groups, x, fixed), x, chosen) for x in variants.values()]
        rows, norms = torch.stack([part for part, _ in pairs]), torch.tensor([norm for _, norm in pairs])
        all_weights = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        return cosines(rows), norms, standard_error(rows, cfg.seed) if all_weights > limit else 0.0

    moments = [measured()]
    for _ in range(updates):
        run.config = cfg
        train.update(run, batch_for(run, groups, cfg, fixed), cfg.warmup_steps + 1)
    return moments + ([measured()] if updates else [])


def ordered(C: Tensor) -> list[int]:
    """Return an order in which each variant is followed by the one that is most like it."""
    order, rest = [0], list(range(1, len(C)))
    while rest:
        order.append(max(rest, key=lambda k: C[order[-1], k].nan_to_num(-2.0).item()))
        rest.remove(order[-1])
    return order


def interval(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mean over seeds, and half of its 95 % interval, or None for one seed."""
    n = len(values)
    return values.mean(0), None if n == 1 else T_95[min(n, 10) - 2] * values.std(0) / n**0.5


def table(title: str, names: list[str], order: list[int], C: Tensor, norms: Tensor, error: float) -> None:
    """Print the cosines (S, V, V) and the norms (S, V) of S seeds."""
    (C, C_half), (norms, norms_half) = interval(C), interval(norms)
    cell = (lambda x, half: f"{x:.3f}") if C_half is None else (lambda x, half: f"{x:.3f}±{half:.3f}")
    width = 8 if C_half is None else 14
    print(f"\n{title}" + (f"; standard error of a cosine at most {error:.4f}" if error else ""))
    print(" " * 21 + "".join(f"{names[k][: width - 1]:>{width}}" for k in order) + "    norm")
    for i in order:
        halves = torch.zeros(len(names)) if C_half is None else C_half[i]
        row = "".join(f"{cell(C[i, j], halves[j]):>{width}}" for j in order)
        print(f"{names[i]:21}{row}    {norms[i]:.4g}" + ("" if norms_half is None else f"±{norms_half[i]:.2g}"))


def picture(path: str, titles: list[str], names: list[str], order: list[int], matrices: list[Tensor]) -> None:
    figure = Figure(figsize=(6.2 * len(matrices), 5.6), layout="constrained")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, title, C in zip(panels, titles, matrices, strict=True):
        image = axes.imshow(C[order][:, order], vmin=-1, vmax=1, cmap=matplotlib.colormaps["RdBu"])
        axes.set_title(title)
        axes.set_xticks(range(len(names)), [names[k] for k in order], rotation=90)
        axes.set_yticks(range(len(names)), [names[k] for k in order])
    figure.colorbar(image, ax=list(panels), label="cosine")
    figure.savefig(path, dpi=110)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser("tools.compare", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=0, help="also compare after this many updates")
    parser.add_argument("--vary", action="append", default=[], help="SETTING=VALUE,VALUE in place of the presets")
    parser.add_argument("--seeds", help="such as 1,2,3, for intervals; default: --seed")
    parser.add_argument("--coordinates", type=int, default=1_000_000, help="limit of weights that cosines are over")
    parser.add_argument("--picture", help="file for a picture of the cosines")
    args, words = parser.parse_known_args(words)
    typed = command_line.parse(words, torch.cuda.is_available())
    if args.updates < 0 or args.coordinates < BLOCKS:
        parser.error(f"--updates must be at least 0, and --coordinates at least {BLOCKS}")
    try:
        variants = variants_of(typed, words, args.vary)
        cfg = command_line.ready(typed, torch.cuda.is_available())
        numbers = [int(seed) for seed in args.seeds.split(",")] if args.seeds else [cfg.seed]
        results = []
        for seed in numbers:
            own = {name: replace(x, seed=seed) for name, x in variants.items()}
            results.append(measure(replace(cfg, seed=seed), own, args.updates, args.coordinates))
    except UserError as error:
        parser.error(str(error))
    names, titles = list(variants), ["at the policy that sampled", f"after {args.updates} updates with {cfg.algorithm}"]
    order, matrices = None, []
    for title, moment in zip(titles, zip(*results, strict=True), strict=False):
        C, norms = torch.stack([x[0] for x in moment]), torch.stack([x[1] for x in moment])
        order = order or ordered(C.mean(0))
        matrices.append(C.mean(0))
        table(title, names, order, C, norms, max(x[2] for x in moment))
    if args.picture:
        picture(args.picture, titles[: len(matrices)], names, order, matrices)


if __name__ == "__main__":
    main(sys.argv[1:])
