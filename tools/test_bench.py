"""The benchmark: both samplers draw the planned tokens, and what is measured is what its tables show."""

import json
import shutil

import pytest
import torch

import rollout
import train
from conftest import ROOT, lines
from tools import bench

MODEL = str(ROOT / "models" / "addition")
SMALL = "--prompts_per_step 3 --num_generations 4 --max_completion_length 12"
STEP = f"step --way ours --rows 4 -- --model {MODEL} {SMALL}"


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch):
    names = (train, "uniforms"), (train, "rollout"), (train, "load_task"), (rollout, "sample")
    for owner, name in names:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what is put around it is taken off


def args(words: str = STEP, **others):
    made = bench.parse(words.split())
    vars(made).update(others)
    return made


def test_the_plan():
    run, tokens = bench.planned_run(args())
    ends, lengths = run.tokenizer.eos_token_id, []
    for row in tokens.tolist():
        assert ends not in row or {*row[row.index(ends) + 1 :]} <= {run.tokenizer.pad_token_id}
        lengths.append(row.index(ends) + 1 if ends in row else 12)
        assert not {*run.tokenizer.all_special_ids} & {*row[: lengths[-1] - 1]}
    assert len(set(lengths)) > 3 and tokens.equal(bench.planned_run(args())[1])
    assert run.config.micro_batch_tokens == 4 * (12 + max(len(row["prompt"]) for row in run.task.train))
    run, _ = bench.planned_run(args(prompt_tokens=17))
    assert [len(run.tokenizer(row["prompt"])["input_ids"]) for row in run.task.train] == [17] * 3


def completions(run, tokens: torch.Tensor) -> list[list[int]]:
    """Each up to its end."""
    ends = [(row == run.tokenizer.eos_token_id).tolist() for row in tokens]
    return [row[: end.index(True) + 1 if True in end else None] for row, end in zip(tokens.tolist(), ends)]


def test_a_step_of_ours_has_the_planned_completions():
    run, tokens = bench.planned_run(args())
    bench.force_ours(tokens)
    for step in (1, 2):
        _, groups = train.training_step(run, step)
        assert [group.row for group in groups] == run.task.train
        assert [made.ids for group in groups for made in group.completions] == completions(run, tokens)


def test_generate_has_the_planned_completions():
    """As TRL calls it: sampling, all rows at once, padded on the left."""
    run, tokens = bench.planned_run(args())
    bench.wrap(run.model, "generate", bench.partial(bench.force_trl, tokens))
    ids = torch.randint(2, 17, (12, 6))
    settings = dict(max_new_tokens=12, do_sample=True, eos_token_id=1, pad_token_id=0)
    made = run.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[:, 6:]
    assert made.equal(tokens[:, : made.shape[1]]) and not tokens[:, made.shape[1] :].any()


def measured(capsys, way: str) -> tuple[dict, dict]:
    bench.measure(args(way=way))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_is_measured_makes_the_newest_table_of_its_kind(capsys, tmp_path):
    figures, facts = measured(capsys, "ours")
    assert facts["tokens"] == sum(map(len, completions(*bench.planned_run(args())))) and len(facts["grad_norm"]) == 3
    assert len(figures["step_cpu"]) == 2 and all(0 < a < b for a, b in zip(figures["rollout_cpu"], figures["step_cpu"]))
    about = {"hardware": "2 CPU cores", "threads": 1, "transformers": "1.2.3", "commit": "0123456789"} | facts
    both = {way: {"rollout_cpu": [n], "step_cpu": [2 * n], "memory_gb": [n]} for way, n in (("ours", 2), ("TRL", 4))}
    entries = [  # command, tokens, what differs
        ("python bench.py step", 7, {"hardware": "1 CPU core"}),
        ("python -m tools.bench step --repeats 9", 1000, {}),
        ("python -m tools.bench step --ways ours; TRL", 11, {"results": both}),
        ("python bench.py logprobs", 13, {}),
    ]
    entries = [about | {"results": {"ours": figures}, "command": a, "tokens": n} | other for a, n, other in entries]
    (tmp_path / "log").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    table = bench.tables(tmp_path / "log")
    assert [n for n in (7, 11, 13, 1000) if f": {n} tokens" in table] == [11, 1000]
    assert "| ours / TRL | 0.50 | 0.50 | 0.50 | 0.50 | 2.0 |" in table


def test_other_work_is_an_error():
    ours = {"grad_norm": [1.0, 2.0], "tokens": 100}
    bench.check_same_work({"ours": ours, "TRL": ours | {"grad_norm": [1.0005, 2.0]}})
    for other in ({"grad_norm": [1.0, 2.1]}, {"tokens": 101}):
        with pytest.raises(SystemExit, match="not the same work: TRL"):
            bench.check_same_work({"ours": ours, "TRL": ours | other})


def test_trl_does_the_same_work(capsys):
    pytest.importorskip("trl")
    facts = {}
    for way in bench.WAYS:
        with pytest.MonkeyPatch.context() as undone:
            undone.setattr(train, "load_task", train.load_task)
            facts[way] = measured(capsys, way)[1]
    bench.check_same_work(facts)


def test_what_is_learnt(tmp_path):
    """The run of train.py, timed; its table pairs the seeds of two ways."""
    flags = "--steps 4 --prompts_per_step 2 --eval_every 2 --eval_prompts 16 --eval_k 1".split()
    asked = args(f"learn --out {tmp_path} --seeds 3 --target 0.3", way="ours", seed="3", flags=flags)
    bench.learn(asked)
    made = lines(tmp_path / "ours-3" / "metrics.jsonl")
    assert train.main([*flags, "--warmup_steps", "0", "--seed", "3", "--out", str(tmp_path / "plain")]) == 0
    plain = [line for line in lines(tmp_path / "plain" / "metrics.jsonl") if line["step"]]
    for name in ("step", "reward", "eval/accuracy"):
        assert [line.get(name) for line in made] == [line.get(name) for line in plain]
    seconds = [line["seconds"] for line in made]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3]
    assert [line["seconds to target"] for line in made] == [None, seconds[1], seconds[1], seconds[1]]
    shutil.copytree(tmp_path / "ours-3", tmp_path / "TRL-3")
    asked = args(f"learn --out {tmp_path} --seeds 3", ways=["ours", "TRL"])
    table = bench.learn_table(asked)
    assert "| reward:1-4 | ours |" in table and "| | TRL | 0." in table and "| +0.000, " in table
    never = "".join(json.dumps(line | {"seconds to target": None}) + "\n" for line in made)
    (tmp_path / "TRL-3" / "metrics.jsonl").write_text(never)
    assert bench.learn_table(asked) == table[: table.index("\n| seconds to target")], "of all runs or none"
