"""Tracing: what is recorded of a round, and how it is shown."""

from __future__ import annotations

import math
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import engine
import pytest
import torch

from vllm_subspec.engine.runner import Verifier
from vllm_subspec.engine.trace import Tracer, likeliest, traced
from vllm_subspec.engine.worker import SubSpecWorkerMixin
from vllm_subspec.round.tree import TokenTree, grow
from vllm_subspec.tools.bench import trace_html, trace_text
from vllm_subspec.tools.cli import main

WORDS = {0: "root", 1: " the", 2: " sea", 3: "<b>&\"'", 4: "\n", 5: " wave", 6: "</script>"}
ROUND = {  # root -> 1, 2; 1 -> 3, 4; 3 -> 5
    "tokens": [0, 1, 2, 3, 5, 4], "parents": [0, 0, 0, 1, 1, 3], "depths": [0, 1, 1, 2, 2, 3],
    "draft_logprobs": [0.0, *map(math.log, [0.75, 0.25, 0.5, 0.2, 1.0])],
    "target_tokens": [1, 3, 1, 6, 1, 2], "target_probs": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], "path": [0, 1, 3], "bonus": 6,
}  # fmt: skip


def make_tree() -> TokenTree:
    """The tree of ROUND"""
    tree = TokenTree.empty(6)
    tree.tokens[:] = torch.tensor(ROUND["tokens"])
    tree.parents[:] = torch.tensor(ROUND["parents"])
    tree.depths[:] = torch.tensor(ROUND["depths"])
    return tree


def make_logits() -> torch.Tensor:
    """Each node's target choice with its probability, the rest spread over the other tokens"""
    logits = torch.empty(6, 50)
    for i, (token, prob) in enumerate(zip(ROUND["target_tokens"], ROUND["target_probs"])):
        logits[i] = math.log((1 - prob) / 49)
        logits[i, token] = math.log(prob)
    return logits


def test_a_round_as_recorded():
    """Catches: scores taken for probabilities after the parent, a path by node number, the bonus as accepted."""
    logprobs = ROUND["draft_logprobs"]
    scores = torch.tensor([0, logprobs[1], logprobs[2], logprobs[1] + logprobs[3], logprobs[1] + logprobs[4],
                           logprobs[1] + logprobs[3] + logprobs[5]])  # fmt: skip
    made = traced(make_tree(), scores, *likeliest(make_logits()), emitted=[1, 3, 6])
    for key in ("tokens", "parents", "depths", "target_tokens", "path", "bonus"):
        assert getattr(made, key) == ROUND[key]
    assert made.draft_logprobs == pytest.approx(logprobs, abs=1e-6)
    assert made.target_probs == pytest.approx(ROUND["target_probs"], abs=1e-5)


class Speculator:
    """Drafts with made-up logits: as much of SubSpecSpeculator as a tracer touches."""

    WIDTH, DEPTH = 2, 3

    def __init__(self):
        self.graph = "the graph before"
        self.logits = torch.randn(self.DEPTH, self.WIDTH, 20, generator=torch.Generator().manual_seed(0))

    def draft(self) -> TokenTree:
        k = self.WIDTH
        self.tree, self.leaves = TokenTree.empty(1 + k * self.DEPTH), torch.zeros(k, dtype=torch.int64)
        self.scores, self.new = torch.tensor([0.0, float("-inf")]), torch.arange(1, 1 + k)
        for level in range(self.DEPTH):
            assert self.graph is None, "a captured graph cannot be traced"
            self.step(num_keys=1 + k * level)
        return self.tree

    def capture(self) -> None:
        self.graph = "a captured graph"

    def step(self, num_keys: int) -> None:
        logits = self.logits[(num_keys - 1) // self.WIDTH]
        self.scores = grow(self.tree, self.leaves, self.scores, logits, self.new, 0.5)
        self.leaves, self.new = self.new.clone(), self.new + self.WIDTH


def test_tracer_records_each_node_and_leaves_no_trace():
    """Catches: scores of the last level only, those of an earlier draft, hooks that stay after the end."""
    speculator = Speculator()
    output = SimpleNamespace(sampled_token_ids=torch.zeros(1, 5, dtype=torch.int64), num_sampled=torch.tensor([1]))
    verify = lambda logits, batch: output  # noqa: E731
    runner = SimpleNamespace(speculator=speculator, rejection_sampler=Verifier(verify), round=None)
    tracer = Tracer(runner)
    for _ in range(2):
        runner.round = SimpleNamespace(tree=speculator.draft())
        assert runner.rejection_sampler(torch.zeros(7, 20), None) is output
    runner.round = None  # a plain step
    runner.rejection_sampler(torch.zeros(1, 20), None)
    rounds = tracer.stop()
    assert len(rounds) == 2 and rounds[0] == rounds[1]
    assert (
        runner.rejection_sampler.verify is verify
        and speculator.graph == "a captured graph"
        and "step" not in vars(speculator)
    )
    expected = torch.log_softmax(speculator.logits / 0.5, dim=-1)
    made, position = rounds[0], {0: 0, **{1 + i: i % 2 for i in range(6)}}
    for node in range(1, 7):
        parent = made["parents"][node]
        wanted = expected[made["depths"][parent], position[parent], made["tokens"][node]]
        assert made["draft_logprobs"][node] == pytest.approx(wanted.item(), abs=1e-5)


@pytest.mark.parametrize("before, after", [("the graph before", "a captured graph"), (None, None)])
def test_a_tracer_does_not_bring_back_a_graph(before, after):
    """Catches: a captured draft that writes to buffers of a tree that is no more, or drafts by options that were
    before; one where nothing can be captured."""
    speculator = Speculator()
    speculator.graph = before
    Tracer(SimpleNamespace(speculator=speculator, rejection_sampler=Verifier(None), round=None)).stop()
    assert speculator.graph == after


def test_a_worker_traces_on_and_off_in_any_order():
    """Catches: an engine that stays slow or wrapped after two calls, off without on as an error."""
    worker = SubSpecWorkerMixin()
    speculator, verify = Speculator(), object()
    verifier = Verifier(verify)
    worker.model_runner = SimpleNamespace(speculator=speculator, rejection_sampler=verifier, tree=None)
    assert worker.subspec_trace(False) == []
    for on in (True, True, False, False):
        assert worker.subspec_trace(on) == []
    assert verifier.verify is verify and speculator.graph == "a captured graph" and "step" not in vars(speculator)


def test_text():
    """Catches: accepted tokens that are not marked, siblings of other parents, a target's choice that is missing."""
    text = trace_text.render([ROUND, ROUND], WORDS.__getitem__)
    first, second = text.split("\n\n")
    lines = first.splitlines()
    assert "6 nodes, 3 levels, 2 accepted, 3 tokens emitted" in lines[0]
    assert "' the'" in lines[2] and "0.75" in lines[2] and "' sea' 0.25" in lines[2]
    assert "0.50" in lines[3] and "' wave' 0.20" in lines[3] and "' sea'" not in lines[3]
    assert (
        lines[4].startswith("target") and "'</script>'" in lines[4] and "0.60" in lines[4] and r"'\n' 1.00" in lines[4]
    )
    assert second.startswith("round 2")


class Page(HTMLParser):
    """Tags that are open, and all that is text"""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.addresses = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for key, value in attributes if key in ("src", "href")]
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def make_page() -> str:
    return trace_html.page([ROUND, ROUND], WORDS.__getitem__, "Is <b> & </p> bold?", "It <script>alert(1)</script> is.")


def test_html_is_one_page_with_all_text_escaped():
    """Catches: token text that becomes markup, tags left open, anything loaded from elsewhere, a node not drawn."""
    page = Page()
    page.feed(make_page())
    assert page.open == [] and page.addresses == []
    assert not {"b", "script", "link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 2 and page.tags.count("rect") == 2 * (6 + 1)
    text = "".join(page.text)
    assert "Is <b> & </p> bold?" in text and "<script>alert(1)</script>" in text and "</script>" in text
    assert "<b>&" in text and "tau 3.00" in text


def test_html_in_a_browser(tmp_path):
    """Catches: a page that a browser reads otherwise than the parser above: boxes without size, scripts run."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium")
    path = tmp_path / "trace.html"
    path.write_text(make_page())
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    dump = subprocess.run(
        [browser, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    ).stdout
    assert dump.count("<rect") == 14 and "<script>" not in dump and "&lt;script&gt;" in dump
    picture = tmp_path / "page.png"
    subprocess.run([browser, *flags, f"--screenshot={picture}", path.as_uri()], capture_output=True, timeout=120)
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    green = (pixels[..., 1] > pixels[..., 0] + 0.05) & (pixels[..., 1] > pixels[..., 2] + 0.05)
    assert green.sum() > 500, "accepted nodes are drawn in green"


BAD = [(["--model", "nowhere"], "no model directory"), (["--subspec", "x"], "key=value"),
       (["--html", "/nowhere/t.html"], "/nowhere/t.html")]  # fmt: skip


@pytest.mark.parametrize("arguments, said", BAD)
def test_bad_input_is_one_sentence(arguments, said, capsys):
    """Catches: a file that cannot be written, found only after the run."""
    assert main(["trace", "--prompt", "x", *arguments]) != 0
    printed = capsys.readouterr().err
    assert said in printed and len(printed.strip().splitlines()) == 1


def test_traced_tokens_are_the_answers(tiny_checkpoints):
    """Catches: rounds lost or mixed up, tracing that changes what the engine emits. Two engines in one process."""
    request = {"prompt": [1, 7, 30, 12, 5], "params": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}}
    job = {"model": tiny_checkpoints["llama"], "batches": [[request]]}
    plain, answer = engine.subspec([job, {**job, "probe": "traced"}], tree_width=3, tree_depth=6)
    (tokens,) = answer["batches"][0][0]["tokens"]
    rounds = answer["probe"]
    assert tokens == plain["batches"][0][0]["tokens"][0]
    emitted = [token for r in rounds for token in [*(r["tokens"][node] for node in r["path"][1:]), r["bonus"]]]
    # The first token comes from the prefill, and the last may be a plain step's.
    assert len(emitted) >= len(tokens) - 2 and tokens[1:][: len(emitted)] == emitted[: len(tokens) - 1]
    accepted = [r["accepted"] for r in answer["rounds"] if r["tree_size"] > 1]
    assert [len(r["path"]) - 1 for r in rounds] == accepted and max(accepted) > 0
