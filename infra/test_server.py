"""Sampling on an inference server, here a stand-in that speaks the same requests and can fail in each way."""

import itertools
import json
import os
import socket
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig

import train
from conftest import errors, flags, metrics, run
from infra import report, server
from infra.lora import add_adapters
from rollout import Completion, Sampling, rollout
from tasks.sorting import model as sorting_model


class StandIn(ThreadingHTTPServer):
    """Samples with this project's `rollout`. Tensors whose name contains `stale` keep their values, and settings of a
    request that are in `disobeyed` have the values there. `fault` is called with each path before a request is
    answered, and may change the server. What it returns, if anything, is the status and text of the answer."""

    request_queue_size = server.OPENING  # new connections that may wait

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.url, self.asked, self.stale = f"http://127.0.0.1:{self.server_port}/", [], "no tensor"
        self.disobeyed, self.versions, self.fault = {}, [], lambda server, path: None
        self.opened, self.computing = [], threading.Lock()  # all connections so far; one computation at a time
        self.restart()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self) -> None:
        self.versions.append("as started")
        self.model = add_adapters(sorting_model(SimpleNamespace(seed=0))[0], rank=4, alpha=32)
        self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.clone())  # no longer that of the embedding

    def disconnect(self) -> None:
        """Close all connections, as servers do with those that nobody has used for a while."""
        for connection in self.opened:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path: str, body: dict) -> dict:
        if path == "/weight_info":
            return {"weight_version": self.versions[-1]}
        if path == "/update_weight_version":
            self.versions.append(body["new_version"])
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            weights, self.folders = load_file(folder / "model.safetensors"), [*folder.parent.iterdir()]
            self.loaded = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        if path == "/v1/load_lora_adapter" and body["load_inplace"]:
            adapters = load_file(f"{body['lora_path']}/adapter_model.safetensors").items()
            self.folders = [*Path(body["lora_path"]).parent.iterdir()]
            self.loaded = {name.removeprefix("base_model.model.").removesuffix(".weight"): x for name, x in adapters}
        if path == "/reset_prefix_cache":  # until then, it answers as with the weights from before
            self.take(self.loaded)
        return self.complete(body) if path == "/v1/completions" else {}

    def take(self, weights: dict) -> None:
        new = {name: x for name, x in weights.items() if self.stale not in name}
        assert not self.model.load_state_dict(new, strict=False).unexpected_keys

    def complete(self, body: dict) -> dict:
        self.asked.append(body)
        body = body | self.disobeyed
        settings = Sampling(body["max_tokens"], body["stop_token_ids"], body["temperature"], head=body["logprobs"])
        uniform = np.random.default_rng(body["seed"]).random((1, body["max_tokens"]))
        (one,) = rollout(self.model, [body["prompt"]], uniform, settings)
        tops = [{f"token_id:{i}": float(x)} for i, x in zip(one.ids, one.logp)]
        for t, top in enumerate(tops if settings.head else []):
            top |= {f"token_id:{i}": float(x) for i, x in zip(one.head_ids[t], one.head_logp[t])}
        logprobs = dict(token_logprobs=one.logp.tolist(), top_logprobs=tops)
        finish = body.get("finish_reason", "length" if one.truncated else "stop")
        return {"choices": [dict(token_ids=one.ids.tolist(), finish_reason=finish, logprobs=logprobs)]}


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept

    def setup(self) -> None:
        super().setup()
        self.server.opened.append(self.connection)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or "{}")
        path = self.requestline.split()[1]  # unlike self.path, it has all slashes
        with self.server.computing if path == "/v1/completions" else nullcontext():
            status, text = self.server.fault(self.server, path) or (200, None)
            text = text or json.dumps(self.server.answer(path, body))
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def handle(self) -> None:
        with suppress(ConnectionError):  # whoever asked may be gone
            super().handle()

    def log_message(self, *args) -> None:
        pass


TRIAL = 2 * 4  # requests of the short trial to each server: four prompts twice


def shorten_the_trial() -> None:
    """Do in another process what the fixture `stand_in` does in this one."""
    server.TRIAL_PROMPTS = 4


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(server, "TRIAL_PROMPTS", 4)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # servers are asked without a proxy
    soon = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / 20)})
    monkeypatch.setattr(server, "time", soon)
    return StandIn()


@pytest.fixture
def go(sorting, tmp_path, stand_in):
    """Return a function that makes a run with the stand-in, and returns its folder."""

    def run_here(name: str = "out", code: int = 0, **settings):
        settings = sorting | dict(server=[stand_in.url], max_completion_length=12, learning_rate=0.02) | settings
        typed = {name: x for name, x in settings.items() if x is not None}
        assert train.main(flags(typed, tmp_path / name)) == code
        return tmp_path / name

    return run_here


ALONE = threading.Lock()


def again(row: dict, turns: list[str]) -> str | None:
    assert ALONE.acquire(blocking=False), "replies are the user's code, of which one call is made at a time"
    time.sleep(0.02)  # longer than the answer to a request takes
    ALONE.release()
    assert not turns[-1].startswith(f"{turns[0]}b>") and len("".join(turns)) < 12, "a turn is what the model wrote"
    return "b>" if len(turns) == 1 else None


AGAIN = f"{__name__}:again"


def test_a_run_trains_on_what_a_server_has_sampled_with_its_weights(go, stand_in, tmp_path):
    """Each request names all of its settings. The folder of the weights is deleted at the end."""
    evaluation = dict(eval_every=3, eval_prompts=3, eval_k=2)
    out = go(steps=3, score_centering=3, temperature=0.5, reply=AGAIN, server_folder=tmp_path, **evaluation)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(0.0 <= line["sampler_gap"] < 1e-5 and line["grad_norm"] > 0 and line["turns"] > 1 for line in lines)
    assert all(line["seconds_handover"] > 0.0 and line["seconds_waited"] > 0.0 for line in lines)
    assert all(len(one["prompt"]) + one["max_tokens"] <= 7 + 12 for one in stand_in.asked), "turns share the limit"
    assert all(one["ignore_eos"] and one["top_k"] == 0 and one["repetition_penalty"] == 1.0 for one in stand_in.asked)
    # If the run is killed, its next start deletes what is called .partial.
    assert [(path.parents[1], path.parent.suffix) for path in stand_in.folders] == [(tmp_path, ".partial")] * 2
    assert not [path for path in tmp_path.iterdir() if "weights" in path.name]
    there = stand_in.model.state_dict()
    for name, x in load_file(out / "model/model.safetensors").items():
        assert x.equal(there[name])  # the last evaluation was made with the last weights


def steps_done(prompts, trainer_state, log_metric, **columns):
    """Log the number of finished steps, and judge nothing."""
    log_metric("steps_done", trainer_state.global_step)
    return [None] * len(prompts)


def test_with_a_delay_a_server_samples_during_the_updates_with_the_weights_from_before(go, stand_in, monkeypatch):
    """Each step hands its weights over once, even if dynamic sampling needs further rounds after the updates. What is
    sampled has the random numbers of the step that trains on it, and what rewards log is reported in that step. A run
    that was stopped and continued gives the same numbers."""
    update, pick_rows, meanwhile, paths, picked, is_slow = train.update, train.pick_rows, [], [], [], []

    def fault(stand_in, path):
        paths.append(path)
        if path == "/v1/completions" and len(stand_in.asked) % 12 == 0 and is_slow[-1]:
            time.sleep(0.3)  # so that an update begins before the last of these twelve requests

    def updating(run, batch, step):
        before, end = len(stand_in.asked), time.monotonic() + 30
        while len(stand_in.asked) == before and time.monotonic() < end:
            time.sleep(0.01)
        meanwhile.append(len(stand_in.asked) - before)
        return update(run, batch, step)

    stand_in.fault = fault
    monkeypatch.setattr(train, "update", updating)

    def picking(run, n, step):
        picked.append((step, np.random.rand()))
        is_slow.append(len(run.queue) == 2)  # the queue is full, so these are sampled during the updates
        return pick_rows(run, n, step)

    monkeypatch.setattr(train, "pick_rows", picking)
    settings = dict(delay=2, eval_every=0, save_every=1, dynamic_sampling=1, max_completion_length=6)
    settings["reward"] = ["test_train:letters", f"{__name__}:steps_done"]
    whole = metrics(go("whole", steps=3, **settings))
    assert len(meanwhile) == 3 and all(meanwhile), "nothing waits for the server before an update"
    assert paths.count("/collective_rpc") == 2 + 2, "in the trial twice, and once in each later step"
    gaps = [line["sampler_gap"] for line in whole]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-4, "after step 1, completions are one update old"
    steps, firsts = [step for step, _ in picked], dict(picked[::-1])  # what the first call for each step has drawn
    assert [line["delay"] for line in whole] == [0, 1, 2] and steps == sorted(steps), "rows are those of a later step"
    assert firsts == {step: train.ranks.seed_everything(0, step, 0) or np.random.rand() for step in firsts}
    assert [line["logged/steps_done"] for line in whole] == [0, 1, 2]
    seeds = [one["seed"] for one in stand_in.asked[TRIAL:]]
    assert len({*seeds}) == len(seeds), "no random numbers are used twice"
    go("parts", steps=1, **settings)
    assert metrics(go("parts", steps=3, **settings)) == whole


def test_two_ranks_of_a_sharded_model_share_two_servers(sorting, tmp_path, stand_in):
    """Each server gets half of the twelve requests of a step. In step 3 both refuse them. One rank says so."""
    both = stand_in, StandIn()
    for one in both:
        one.fault = lambda one, path: (400, "no") if "compl" in path and len(one.asked) >= TRIAL + 12 else None
    settings = dict(server=[one.url for one in both], max_completion_length=12, learning_rate=0.02, steps=3, shard=True)
    shown = run(sorting | settings, tmp_path / "out", shorten_the_trial, code=2, world=2)
    lines = metrics(tmp_path / "out")
    assert len(lines) == 2 and all(line["sampler_gap"] < 1e-5 for line in lines) and shown.count("error: ") == 1


def test_seconds_are_those_of_one_step(monkeypatch):
    """Here, each look at the clock is a second after the last one."""
    monkeypatch.setattr(server, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    one = server.Server(["http://a"], timeout=1.0, has_adapters=False)
    for _ in range(2):  # rounds of dynamic sampling
        server.wait_for(one, one.background.submit(list))
    assert [one.take_seconds()["seconds_waited"] for _ in range(2)] == [2, 0]


def test_weights_are_served_in_the_dtype_of_the_rollout(go, stand_in):
    """bf16 has a relative error of 0.4 %. There, the trial accepts larger differences, such as those of this server."""
    assert all(1e-6 < line["sampler_gap"] < 0.01 for line in metrics(go(steps=2, rollout_dtype="bfloat16")))
    stand_in.disobeyed = dict(temperature=1.05)
    assert metrics(go("off", steps=1, rollout_dtype="bfloat16"))[0]["sampler_gap"] > 0.01


def test_greedy_completions_and_their_replies_are_those_of_generate(go, stand_in, sorting, tmp_path, watch):
    evaluations = watch(report, "metrics_of_evaluation")
    cut = dict(top_k=5, top_p=0.9, min_p=0.1, stop=["~"])
    settings = cut | dict(keep_set=False, temperature=0.25, steps=0, eval_every=1, eval_k=1, reply=AGAIN)
    assert train.main(flags(sorting | settings | dict(max_completion_length=12), tmp_path / "own")) == 0
    (served,), (own,) = metrics(go(**settings)), metrics(tmp_path / "own")
    names = "eval/reward", "eval/accuracy", "eval/completion_length", "eval/turns"  # of the greedy completions
    assert [served[name] for name in names] == [own[name] for name in names]
    greedy = (call.args[0] for call in evaluations)
    own, of_served = ([one for group in groups for one in group.completions] for groups in greedy)
    assert [one.replies for one in own] == [one.replies for one in of_served]
    assert {(len(one.turns), tuple(one.replies)) for one in own} == {(1, ()), (2, ("b>",))}
    assert all(one == one | cut for one in stand_in.asked[TRIAL + 96 :])


def test_after_an_empty_reply_a_server_begins_the_next_turn(stand_in):
    sampling = Sampling(12, [-1], temperature=0.0)
    sampling.eos_ids = [int(rollout(stand_in.model, [[3, 4]], None, sampling)[0].ids[1])]
    (own,) = rollout(stand_in.model, [[3, 4]], None, sampling, replies=[lambda turn: []])
    one = server.Server([stand_in.url], timeout=1.0, has_adapters=False)
    of_server = server.complete(one, stand_in.url, [3, 4], np.zeros(12), sampling, lambda turn: [])
    assert of_server.turns == own.turns and of_server.truncated and len(own.turns) > 1 and own.written.all()


def test_heads_are_those_that_rollout_records(stand_in):
    asked = dict(prompt=[3, 4], max_tokens=12, stop_token_ids=[-1], temperature=1.0, logprobs=3, seed=0)
    tops = stand_in.complete(asked)["choices"][0]["logprobs"]["top_logprobs"]
    (one,) = rollout(stand_in.model, [[3, 4]], np.random.default_rng(0).random((1, 12)), Sampling(12, [-1], head=3))
    ids, logp = server.likeliest(one, tops, 3)
    assert (ids == one.head_ids).all() and max(map(len, tops)) == 4  # with sampled ids that are not among the three
    assert logp == pytest.approx(one.head_logp, abs=1e-5)
    # The others have at least the probability of the sampled id, even where 1 minus the head's is 0.
    rare = Completion([9], [-20.0], truncated=False)
    assert server.likeliest(rare, [{"token_id:9": -20.0, "token_id:1": 0.0}], 1)[1].tolist() == [[0.0, -20.0]]


PARTS = ("lm_head", "embed", "norm", "attn", "mlp")
NOISE = "given weights with noise, its log-probs differ from the trainer's by"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stale", PARTS)
def test_a_server_that_goes_on_with_a_part_of_its_old_weights_is_refused(go, stand_in, capsys, stale, dtype):
    stand_in.stale = stale
    go(code=2, server=[StandIn().url, stand_in.url], rollout_dtype=dtype)
    assert f"error: --server {stand_in.url}: {NOISE}" in capsys.readouterr().err


def test_noise_reaches_tensors_that_are_nearly_zero():
    """A norm of Gemma multiplies by 1 + w, and w may be small. Without noise in it, an old norm would not show."""
    noisy = server.with_noise({"norm.weight": torch.full((1000,), 1e-4)}, 0.5, seed=0)["norm.weight"]
    assert 0.009 < float(noisy.std()) < 0.011


def test_adapters_are_handed_over(go, sorting, stand_in, capsys, tmp_path):
    for part in sorting_model(SimpleNamespace(seed=0)):
        part.save_pretrained(tmp_path / "base")
    GenerationConfig(eos_token_id=[1, 5]).save_pretrained(tmp_path / "base")
    settings = dict(model=tmp_path / "base", lora_rank=4)
    assert all(line["sampler_gap"] < 1e-5 and line["grad_norm"] > 0 for line in metrics(go("made", **settings)))
    assert len(stand_in.folders) == 2, "the adapters from before are deleted once the server has the new ones"
    # The rank is in the file of the adapters. There are prompts to evaluate on, but none to train on.
    of_data = dict(task="data", data=None, eval_data=sorting["data"], reward="tasks.sorting:sorted_share")
    go(model=tmp_path / "made/checkpoint/000002/model", steps=0, eval_every=1, eval_prompts=3, **of_data)
    assert all(one["model"] == "adapters" and one["stop_token_ids"] == [1, 5] for one in stand_in.asked)
    stand_in.stale = "lora"
    for dtype in ("float32", "bfloat16"):
        stand_in.restart()
        go(f"stale-{dtype}", code=2, rollout_dtype=dtype, **settings)
        assert NOISE in capsys.readouterr().err


@pytest.mark.parametrize("name, value, words", [("temperature", 0.73, NOISE), ("finish_reason", "abort", "with abort")])
def test_a_server_that_samples_otherwise_than_asked_is_refused(go, stand_in, capsys, name, value, words):
    stand_in.disobeyed = {name: value}
    go(code=2, server=[StandIn().url, stand_in.url], temperature=0.7)
    assert words in capsys.readouterr().err


def test_a_restart_of_the_server_ends_the_run_and_the_same_command_goes_on(go, stand_in, monkeypatch, capsys):
    """The server answers with the weights that it started with, and without an error. It restarts while it loads the
    weights of step 2, then between two completions of step 2, after the last one, and during the updates."""

    def restart_at(moment: str, one: StandIn, path: str) -> None:
        if path == moment and len(one.asked) > TRIAL + 5 and one.versions[-1] != "as started":
            one.restart()

    update = train.update
    monkeypatch.setattr(train, "update", lambda *args: stand_in.fault(stand_in, "update") or update(*args))
    settings = dict(steps=3, save_every=1, reply=AGAIN, max_completion_length=7)
    whole = metrics(go("whole", **settings))
    seeds = [one["seed"] for one in stand_in.asked[TRIAL:]]
    assert len({*seeds}) == len(seeds), "no random numbers are used twice, also not in a second turn"
    for moment in ("/collective_rpc", "/v1/completions", "/weight_info", "update"):
        stand_in.asked, stand_in.fault = [], partial(restart_at, moment)
        out = go(code=2, **settings)
        (said,) = errors(capsys.readouterr().err)
        assert "does not have the weights that it was given: it was restarted" in said
        assert metrics(out) == whole[: 2 if moment == "update" else 1]  # a step is done once its updates are
    stand_in.fault = lambda one, path: None
    assert metrics(go(**settings)) == whole


def test_a_completion_may_take_longer_than_the_timeout_if_the_server_answers(go, stand_in, monkeypatch, capsys):
    """In step 1, a completion takes longer. In step 2, the server answers nothing. While it first loads weights, it
    closes its connections."""
    monkeypatch.setattr(server, "CHECK_EVERY", 0.1)

    def fault(one, path):
        if path == "/collective_rpc" and len(one.versions) == 2:
            one.versions.append(one.versions[-1])  # so that this is done once
            one.disconnect()
        if path == "/v1/completions" and len(one.asked) == TRIAL:
            time.sleep(1.5)
        if len(one.asked) > TRIAL + 12 and path == "/weight_info":
            time.sleep(3.0)

    stand_in.fault = fault
    out = go(code=2, save_every=1, server_timeout=1)
    assert "timed out; see --server_timeout" in capsys.readouterr().err and len(metrics(out)) == 1


def test_a_server_that_is_gone_ends_the_run(go, stand_in, monkeypatch, capsys):
    """Here, each look at the clock is 200 s after the last one, and a server may be lost for 300 s."""
    patient = SimpleNamespace(monotonic=itertools.count(1, 200).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(server, "time", SimpleNamespace(**vars(time) | vars(patient)))

    def fault(one, path):
        if len(one.asked) >= TRIAL + 20:
            one.server_close()
            one.disconnect()
            raise ConnectionError

    stand_in.fault = fault
    out = go(code=2, save_every=1, server_timeout=300)
    assert "refused; see --server_timeout" in capsys.readouterr().err and len(metrics(out)) == 1


def test_many_requests_share_kept_connections_to_a_server_with_a_short_queue(stand_in, monkeypatch):
    """Each of 60 requests is answered once all are there. Then the server closes its connections, as during a long
    update."""
    all_are_there, connected, waiting = threading.Barrier(60), itertools.count(1), []

    class Connection(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            waiting.append(next(connected) - len(stand_in.opened))

    def complete(body):
        all_are_there.wait(60)
        logprobs = dict(token_logprobs=[-1.0], top_logprobs=[{}])
        return {"choices": [dict(token_ids=body["prompt"], finish_reason="stop", logprobs=logprobs)]}

    monkeypatch.setattr(server, "HTTPConnection", Connection)
    stand_in.complete, stand_in.computing = complete, nullcontext()
    one = server.Server([stand_in.url], timeout=60.0, has_adapters=False, folder=Path(stand_in.versions[-1]))
    for opened in (61, 122):  # with one to ask for the version
        for _ in range(2):
            sampled = server.sample_on_servers(one, [[i] for i in range(60)], np.zeros((60, 1)), Sampling(1, [0]))
            assert [completion.ids.tolist() for completion in sampled] == [[i] for i in range(60)]
        assert len(stand_in.opened) == opened and max(waiting) <= server.OPENING
        stand_in.disconnect()


UNUSABLE = [
    ("http://127.0.0.1:9", 600, "refused"), ("localhost:8000", 600, "not an address"), (None, 600, "400 no such thing"),
    (None, 1, "timed out"),
]  # fmt: skip


@pytest.mark.parametrize("url, timeout, words", UNUSABLE)
def test_without_a_server_that_understands_the_run_ends_at_once(go, stand_in, capsys, url, timeout, words):
    def fault(server, path):
        time.sleep(2.0 if timeout == 1 else 0.0)
        return (400, "no such thing") if path == "/v1/completions" else None

    stand_in.fault = fault
    go(code=2, server=[url or stand_in.url], server_timeout=timeout)
    assert words in capsys.readouterr().err


# ---- With a real server of a model with an untied head: VLLM=http://127.0.0.1:8000 pytest -m server ----


@pytest.fixture
def real(tmp_path):
    """Return a function that makes a run of addition with the server's model, and returns its metrics."""
    if (url := os.environ.get("VLLM")) is None:
        pytest.skip("there is no server: give its address in VLLM")
    model = json.load(urlopen(f"{url}/v1/models"))["data"][0]["root"]
    words = ["--task", "addition", "--model", model, "--prompts_per_step", "4"]

    def make(name: str, *more: str, server: bool = True) -> list[dict]:
        served = ["--server", url] if server else []
        assert train.main([*words, *served, "--out", str(tmp_path / name), *more]) == 0
        return metrics(tmp_path / name)

    return make


@pytest.mark.server
def test_a_real_server_samples_with_our_weights(real):
    lines = real("run", "--steps", "4", "--learning_rate", "1e-3", "--eval_every", "0")
    assert all(line["sampler_gap"] < 1e-5 for line in lines)
    evaluation = ["--steps", "0", "--eval_every", "1", "--eval_prompts", "32", "--eval_k", "1"]
    (served,), (own,) = real("served", *evaluation), real("own", *evaluation, server=False)
    names = "eval/reward", "eval/completion_length"
    assert [served[name] for name in names] == pytest.approx([own[name] for name in names], abs=1e-9)


@pytest.mark.server
def test_turns_stop_strings_and_heads_of_a_real_server(real, tmp_path):
    (tmp_path / "again.py").write_text("def reply(row, turns):\n    return '1+1=' if len(turns) == 1 else None\n")
    more = ["--reply", f"{tmp_path}/again.py:reply", "--max_completion_length", "96", "--eval_every", "0"]
    lines = real("turns", "--steps", "2", *more, "--stop", "#1", "--score_centering", "5", "--samples_per_step", "-1")
    assert all(line["sampler_gap"] < 1e-5 and line["turns"] > 1 for line in lines)
    # A turn that ended with "#1", and the reply.
    assert "#11+1=" in (tmp_path / "turns/samples.jsonl").read_text()


@pytest.mark.server
def test_adapters_of_a_real_server(real):
    if not os.environ.get("VLLM_LORA"):
        pytest.skip("give VLLM_LORA=1 if the server was started with --enable-lora")
    more = ["--steps", "3", "--lora_rank", "4", "--learning_rate", "1e-2", "--eval_every", "0"]
    assert all(line["sampler_gap"] < 1e-4 for line in real("lora", *more))
