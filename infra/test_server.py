"""Sampling on an inference server, here a stand-in that speaks the same requests and can fail in each way."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import train
from conftest import flags, metrics, run
from infra import faults
from rollout import Sampling, rollout
from tasks.sorting import model as sorting_model


class StandIn(ThreadingHTTPServer):
    """Samples with this project's `rollout`. `fault` is called with each path before a request is answered, and may
    change the server. What it returns, if anything, is the status and text of the answer."""

    request_queue_size = 512  # connections that wait
    lock = threading.Lock()  # of all servers, because `from_pretrained` must not run twice at once in a process

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.model, self.version, self.asked = None, "as started", []
        self.stale, self.temperature_of_logprobs, self.fault = (), None, lambda server, path: None
        self.restart()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def restart(self) -> None:
        self.model, _ = sorting_model(SimpleNamespace(seed=0))
        self.version = "as started"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict) -> dict:
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            loaded = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"], dtype=torch.float32)
            new = {name: x for name, x in loaded.state_dict().items() if not any(part in name for part in self.stale)}
            self.model.load_state_dict(new, strict=False)
        return self.complete(body) if path == "/v1/completions" else {}

    def complete(self, body: dict) -> dict:
        self.asked.append(body)
        settings = Sampling(body["max_tokens"], body["stop_token_ids"], body["temperature"], head=body["logprobs"])
        uniform = np.random.default_rng(body["seed"]).random((1, body["max_tokens"]))
        (one,) = rollout(self.model, [body["prompt"]], uniform, settings)
        tops = []
        for t, token in enumerate(one.ids.tolist()):
            top = {f"token_id:{token}": float(one.logp[t])}
            if one.head_ids is not None:
                top |= {f"token_id:{i}": float(x) for i, x in zip(one.head_ids[t], one.head_logp[t])}
            tops.append(top)
        logps = (one.logp * (self.temperature_of_logprobs or 1.0)).tolist()
        finish = "length" if one.truncated else "stop"
        chosen = dict(token_ids=one.ids.tolist(), finish_reason=finish)
        return {"choices": [chosen | {"logprobs": {"token_logprobs": logps, "top_logprobs": tops}}]}


class Requests(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or "{}")
        with self.server.lock:
            status, text = self.server.fault(self.server, self.path) or (200, None)
            text = json.dumps(self.server.answer(self.path, body)) if text is None else text
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *args) -> None:
        pass


TRIAL = 2 * 8 + 500  # requests of the trial to each server: eight prompts twice, and single tokens


@pytest.fixture
def stand_in():
    server = StandIn()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def go(sorting, tmp_path, monkeypatch, stand_in):
    """Return a function that makes a run with the stand-in, and returns its folder and what it printed as errors."""
    monkeypatch.setattr(faults, "stop_requests", lambda: [])

    def run_here(name: str = "out", code: int = 0, **settings):
        settings = sorting | dict(server=[stand_in.url], max_completion_length=12, learning_rate=0.02) | settings
        assert train.main(flags(settings, tmp_path / name)) == code
        return tmp_path / name

    return run_here


def test_a_run_trains_on_what_a_server_has_sampled_with_its_weights(go, stand_in):
    """Each request names all of its settings. The folder of the weights is deleted at the end."""
    out = go(steps=3, score_centering=3, eval_every=3, eval_prompts=3, eval_k=2)
    lines = metrics(out)[1:]
    assert all(0.0 <= line["sampler_gap"] < 1e-5 and line["grad_norm"] > 0 for line in lines)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(line["seconds_handover"] > 0.0 and line["seconds_waited"] > 0.0 for line in steps)
    assert len({json.dumps(one["seed"]) for one in stand_in.asked[-20:]}) > 10
    assert all(one["ignore_eos"] and one["top_k"] == 0 and one["repetition_penalty"] == 1.0 for one in stand_in.asked)
    assert not [path for path in out.iterdir() if "served" in path.name]
    trained = load_file(out / "model/model.safetensors")
    for name, x in stand_in.model.state_dict().items():  # the last evaluation was made with the last weights
        assert name not in trained or torch.equal(x, trained[name])


def test_two_ranks_share_two_servers(sorting, tmp_path, stand_in):
    other = StandIn()
    settings = sorting | dict(server=[stand_in.url, other.url], max_completion_length=12, learning_rate=0.02, steps=3)
    run(settings, tmp_path / "out", world=2)
    lines = metrics(tmp_path / "out")
    assert len(lines) == 3 and all(line["sampler_gap"] < 1e-5 for line in lines)
    asked = [len(server.asked) - TRIAL for server in (stand_in, other)]
    assert sum(asked) == 3 * 3 * 4 and min(asked) >= 3 * 4  # prompts and completions of each, over three steps
    other.shutdown()
    other.server_close()


def test_the_trial_scores_in_the_dtype_that_is_served(go):
    lines = metrics(go(steps=2, rollout_dtype="bfloat16"))
    assert all(1e-6 < line["sampler_gap"] < 0.05 for line in lines)  # bf16 has a relative error of 0.4 %


def test_greedy_completions_are_those_of_generate(go, sorting, tmp_path):
    settings = dict(steps=0, eval_every=1, eval_prompts=8, eval_k=1)
    assert train.main(flags(sorting | settings | dict(max_completion_length=12), tmp_path / "own")) == 0
    (served,), (own,) = metrics(go(**settings)), metrics(tmp_path / "own")
    names = "eval/reward", "eval/accuracy", "eval/completion_length"  # of the greedy completions
    assert [served[name] for name in names] == [own[name] for name in names]


@pytest.mark.parametrize("stale, part", [("norm", "norms"), ("self_attn", "attention"), ("mlp", "feed-forward layers")])
def test_weights_that_do_not_arrive_are_named(go, stand_in, capsys, stale, part):
    stand_in.stale = (stale,)
    go(code=2)
    assert f"given new weights, it still computes with the old {part}" in capsys.readouterr().err


def test_log_probs_of_another_temperature_are_noticed(go, stand_in, capsys):
    stand_in.temperature_of_logprobs = 0.7
    go(code=2)
    assert "--logprobs-mode processed_logprobs" in capsys.readouterr().err


def test_a_server_that_restarts_gets_the_weights_again(go, stand_in):
    """It answers with the weights that it started with, and without an error. For a while it answers nothing at all."""
    seen = {"n": 0, "down": 0}

    def fault(server, path):
        seen["n"] += path == "/v1/completions" and server.version != "as started" and len(server.asked) > 530
        if seen["n"] == 5:
            server.restart()
            seen["n"], seen["down"] = 6, 3
        if seen["down"]:
            seen["down"] -= 1
            return 503, "starting"

    stand_in.fault = fault
    out = go(steps=3)
    assert seen["n"] > 6 and all(line["sampler_gap"] < 1e-5 for line in metrics(out))


@pytest.mark.parametrize("url, words", [("http://127.0.0.1:9", "refused"), (None, "400 no such thing")])
def test_without_a_server_that_understands_the_run_ends_at_once(go, stand_in, capsys, url, words):
    stand_in.fault = lambda server, path: (400, "no such thing") if path == "/v1/completions" else None
    go(code=2, server=[url or stand_in.url])
    assert words in capsys.readouterr().err


# ---- With a real server: VLLM=http://127.0.0.1:8000 pytest -m server ----


@pytest.fixture
def real(tmp_path):
    """Return a function that makes a run of addition with the server and its model, and returns its folder."""
    if (url := os.environ.get("VLLM")) is None:
        pytest.skip("there is no server: give its address in VLLM")
    model = json.load(urlopen(f"{url}/v1/models"))["data"][0]["root"]
    words = ["--task", "addition", "--model", model, "--eval_every", "0", "--prompts_per_step", "4"]

    def make(name: str, *more: str, code: int = 0, server: bool = True) -> Path:
        served = ["--server", url] if server else []
        assert train.main([*words, *served, "--out", str(tmp_path / name), *more]) == code
        return tmp_path / name

    return make, json.loads((Path(model) / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.server
def test_a_real_server_has_the_weights_or_is_refused(real, capsys):
    """vLLM's CPU backend packs a head that is tied to the embedding at its start, and never loads it again."""
    make, is_tied = real
    if is_tied:
        make("tied", "--steps", "1", code=2)
        assert "given new weights, it still computes with the old head" in capsys.readouterr().err
        return
    lines = metrics(make("untied", "--steps", "4", "--learning_rate", "1e-3"))
    assert all(line["sampler_gap"] < 1e-5 for line in lines)
    evaluation = ["--steps", "0", "--eval_every", "1", "--eval_prompts", "32", "--eval_k", "1"]
    (served,), (own,) = metrics(make("served", *evaluation)), metrics(make("own", *evaluation, server=False))
    assert [served[f"eval/{x}"] for x in ("reward", "completion_length")] == pytest.approx(
        [own[f"eval/{x}"] for x in ("reward", "completion_length")], abs=1e-9
    )


@pytest.mark.server
def test_turns_stop_strings_and_heads_of_a_real_server(real, tmp_path):
    make, is_tied = real
    if is_tied:
        pytest.skip("the server is refused")
    (tmp_path / "again.py").write_text("def reply(row, turns):\n    return '1+1=' if len(turns) == 1 else None\n")
    reply = ["--reply", f"{tmp_path}/again.py:reply", "--max_completion_length", "96"]
    out = make("turns", "--steps", "2", *reply, "--stop", "#1", "--score_centering", "5", "--samples_per_step", "-1")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert any("#11+1=" in one["completion"] for one in samples)  # a turn that ended with "#1", and the reply
    assert all(line["sampler_gap"] < 1e-5 and line["turns"] > 1 for line in metrics(out))


@pytest.mark.server
def test_adapters_of_a_real_server(real):
    if not os.environ.get("VLLM_LORA"):
        pytest.skip("give VLLM_LORA=1 if the server was started with --enable-lora")
    lines = metrics(real[0]("lora", "--steps", "3", "--lora_rank", "4", "--learning_rate", "1e-2"))
    assert all(line["sampler_gap"] < 1e-4 for line in lines)
