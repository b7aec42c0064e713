"""Looks inside a live in-process engine (see engine.py). Each returns something that JSON can hold."""

from __future__ import annotations

import os
import random
import time

import torch
from torch.overrides import TorchFunctionMode


def runner_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def classes(llm):
    """Which classes serve the model, and what the environment of the next engine says."""
    yield
    runner = runner_of(llm)
    layers = runner.compilation_config.static_forward_context.values()
    return {
        "runner": [c.__name__ for c in type(runner).__mro__],
        "worker": llm.llm_engine.vllm_config.parallel_config.worker_cls,
        "impl": sorted({type(layer.impl).__name__ for layer in layers}),
        "runner_env": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        "speculator": runner.speculative_config is not None,
    }


def sharing(llm):
    """Which tensors of the target and of the draft are the same, by storage; and how many caches there are."""
    runner = runner_of(llm)
    target, draft = runner.model, runner.speculator.model
    tensors = lambda m: {**dict(m.named_parameters()), **dict(m.named_buffers())}  # noqa: E731
    before = {name: t.clone() for name, t in tensors(target).items()}
    yield
    ours = tensors(draft)
    linears = {name for name, m in target.named_modules() if type(m).__name__.endswith("Linear")}
    of_linear = lambda name: name.rpartition(".")[0] in linears and name.endswith(".weight")  # noqa: E731
    return {
        "shared": sorted(n for n, t in tensors(target).items() if n in ours and ours[n].data_ptr() == t.data_ptr()),
        "not_shared": sorted(
            n for n, t in tensors(target).items() if not of_linear(n) and (n not in ours or ours[n] is not t)
        ),
        "substituted": sorted(
            n for n in linears if dict(draft.named_modules())[n] is not dict(target.named_modules())[n]
        ),
        "linears": sorted(linears),
        "changed": sorted(n for n, t in tensors(target).items() if not torch.equal(t, before[n])),
        "layers_with_cache": sum(len(g.layer_names) for g in runner.kv_cache_config.kv_cache_groups),
        "layers": runner.model_config.hf_text_config.num_hidden_layers,
    }


def verified_trees(llm):
    """For some rounds: the tree's tokens and parents, the tokens before it, and the target's logits at every node."""
    runner = runner_of(llm)
    verify, seen = runner.rejection_sampler.verify, []

    def record(logits, input_batch):
        step = runner.round.tree if runner.round is not None else None
        if step is not None and len(seen) < 4:
            index = int(input_batch.idx_mapping[0])
            context_len = int(runner.speculator.context_len)
            seen.append(
                {
                    "context": runner.req_states.all_token_ids.gpu[index, :context_len].tolist(),
                    "tokens": step.tokens.tolist(),
                    "parents": step.parents.tolist(),
                    "logits": logits.float().tolist(),
                }
            )
        return verify(logits, input_batch)

    runner.rejection_sampler.verify = record
    yield
    return seen


def private_context(llm):
    """The draft attends to an empty context of its own: nothing of what the target wrote."""
    from vllm_subspec.cpu import attention

    speculator = runner_of(llm).speculator
    forward, visible = speculator.forward, attention.visible_keys

    def without_context(metadata, window):
        seen = visible(metadata, window).clone()
        seen[:, : int(metadata.context_len)] = False
        return seen

    def blind(*args):
        attention.visible_keys = without_context
        try:
            return forward(*args)
        finally:
            attention.visible_keys = visible

    speculator.forward = blind
    yield


def unshared_norm(llm):
    """The draft's final norm is a fresh one instead of the target's."""
    import copy

    model = runner_of(llm).speculator.model.model
    norm = copy.deepcopy(model.norm)
    torch.manual_seed(0)
    norm.weight.data = torch.rand_like(norm.weight)
    model._modules["norm"] = norm
    yield


def faults(llm):
    """Something fails in every second round: an exception in the draft, NaN logits, logits of another shape, an
    exception in verification, one after the other."""
    from vllm_subspec.round.round import Round

    speculator, state = runner_of(llm).speculator, {"round": 0, "kind": None, "injected": []}
    draft, forward, verify = speculator.draft, speculator.forward, Round.verify

    def faulty_draft(*args):
        state["round"] += 1
        state["kind"] = None
        if state["round"] % 2:
            state["kind"] = ("exception", "nan", "shape", "verify")[state["round"] // 2 % 4]
            state["injected"].append(state["kind"])
        if state["kind"] == "exception":
            raise RuntimeError("injected")
        return draft(*args)

    def faulty_forward(*args):
        logits = forward(*args)
        if state["kind"] == "nan":
            return logits * float("nan")
        return logits[:, :1] if state["kind"] == "shape" else logits

    def faulty_verify(*args):
        if state["kind"] == "verify":
            raise RuntimeError("injected")
        return verify(*args)

    speculator.draft, speculator.forward, Round.verify = faulty_draft, faulty_forward, faulty_verify
    yield
    Round.verify = verify
    return state["injected"]


def broken(llm):
    """Every draft fails. Returns the draft rows of each step."""
    runner, rows = runner_of(llm), []
    prepare = runner.prepare_inputs

    def counted(*args, **kwargs):
        batch = prepare(*args, **kwargs)
        rows.append(batch.num_draft_tokens)
        return batch

    def draft(*args):
        raise RuntimeError("injected")

    runner.prepare_inputs, runner.speculator.draft = counted, draft
    yield
    return rows


def witness(llm):
    """How a custom logits processor was called (see processors.Witness), and in how many steps."""
    (found,) = [p for p in runner_of(llm).sampler.logits_processors if type(p).__name__ == "Witness"]
    found.calls.clear()
    yield
    return found.calls


def grown_and_fresh(llm):
    """Of each whole tree of one request: what was accepted, and what is where a new request comes to the same place
    by its prompt alone. Of a draft that reads KV of its own, only the latter was written by its prefill. And what is
    accepted in the same request of a draft that does not see its context."""
    from vllm import SamplingParams

    def accepted(prompt, max_tokens):
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        trees = [r for r in llm.collective_rpc("subspec_rounds")[0] if r["tree_size"] > 1]
        return list(output.outputs[0].token_ids), [r["accepted"] for r in trees if r["tree_size"] == nodes]

    speculator = runner_of(llm).speculator
    nodes = 1 + speculator.tree_width * speculator.tree_depth
    prompt, emitted = list(range(3, 53)), 1
    tokens, grown = accepted(prompt, 24)
    fresh = []
    for count in grown:
        fresh.append(accepted(prompt + tokens[: emitted - 1], speculator.tree_depth + 2)[1][0])
        emitted += count + 1
    yield
    next(private_context(llm))
    return {"grown": grown, "fresh": fresh, "blind": accepted(prompt, 24)[1]}


def grammar_masks(llm):
    """Masks of grammars that the engine made room for in CPU memory."""
    manager = llm.llm_engine.engine_core.engine_core.structured_output_manager
    yield
    return manager._grammar_bitmask.shape[0]


def free_blocks(llm):
    """KV blocks that are free before and after."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    yield
    return {"before": before, "after": pool.get_num_free_blocks()}


def offloaded_and_substituted(llm):
    """The offloaded parameters, and the linears that have a substitute in the draft, by name."""
    from vllm_subspec.weights.offloaded import offloaded_parameters

    runner = runner_of(llm)
    target, draft = dict(runner.model.named_modules()), dict(runner.speculator.model.named_modules())
    differs = lambda name: getattr(draft[name], "quant_method", None) is not target[name].quant_method  # noqa: E731
    substituted = [name for name, m in target.items() if type(m).__name__.endswith("Linear") and differs(name)]
    yield
    return {"offloaded": sorted(offloaded_parameters(runner.model)), "substituted": sorted(substituted)}


def without_synchronisation(llm):
    """From the start of each draft to the end of its acceptance and commit, a wait of the host is an error."""
    runner, rounds = runner_of(llm), []
    begin, verify = runner._begin_round, runner.rejection_sampler.verify

    # Sync-debug mode sees no waits for events: the draft may wait for levels that lie LAG back, and for nothing else.
    from vllm_subspec.round.draft import LAG

    class Watched:
        latest = 0

        def __init__(self, level, event):
            self.level, self.event = level, event

        def record(self):
            Watched.latest = self.level
            self.event.record()

        def synchronize(self):
            assert Watched.latest - self.level >= LAG
            self.event.synchronize()

    passed = runner.speculator._passed
    runner.speculator._passed = [Watched(level, event) for level, event in enumerate(passed)]

    def unexpected(event):
        if torch.cuda.get_sync_debug_mode() and event not in passed:
            raise RuntimeError("the host waits for an event")
        return wait(event)

    wait = torch.cuda.Event.synchronize
    torch.cuda.Event.synchronize = unexpected

    def start(*args):
        torch.cuda.set_sync_debug_mode("error")
        begun = begin(*args)
        if begun is None:
            torch.cuda.set_sync_debug_mode("default")
        else:
            rounds.append(len(begun.tree))
        return begun

    def end(*args):
        try:
            return verify(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner._begin_round, runner.rejection_sampler.verify = start, end
    yield
    torch.cuda.Event.synchronize = wait
    return rounds


def compiled(llm):
    """How many variants of each of our kernels there are, before and after the requests."""
    from vllm_subspec.round import commit
    from vllm_subspec.round.attention import tree_kernel
    from vllm_subspec.round.noise import _noise_kernel

    kernels = [tree_kernel._attention_kernel, tree_kernel._combine_kernel, commit._move_kernel, _noise_kernel]

    def variants():
        return {kernel.fn.__name__: sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels}

    before = variants()
    yield
    return [before, variants()]


def eager(llm):
    """Whether the draft is a graph, and whether rounds tell their waits for streamed layers from now on."""
    timed = llm.collective_rpc("subspec_time_waits")
    yield
    return {"captured": runner_of(llm).speculator.graph is not None, "timed": timed}


def warmed_up(llm):
    """vLLM's warm-up of kernels as the CUDA worker runs it: longest request, largest batch, most rows of logits at once.
    On CPU vLLM leaves it out."""
    from vllm_subspec.engine.worker import warm_up

    runner, lengths, requests, rows = runner_of(llm), [], [], []
    prepare = runner.prepare_inputs

    def measured(*args, **kwargs):
        batch = prepare(*args, **kwargs)
        lengths.append(int(batch.seq_lens_cpu_upper_bound.max()))
        requests.append(batch.num_reqs)
        rows.append(len(batch.logits_indices))
        return batch

    runner.prepare_inputs = measured
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    warm_up(runner, worker.execute_model, worker.sample_tokens)
    runner.prepare_inputs = prepare
    yield
    return {
        "longest": max(lengths), "requests": max(requests), "rows": max(rows),
        "trees": runner.num_speculative_steps, "max_num_seqs": runner.scheduler_config.max_num_seqs,
    }  # fmt: skip


def memory(llm):
    """GPU memory in use when the requests are done, and the KV cache's part of it, in bytes; offloaded layers."""
    import re

    from vllm_subspec.weights.offloaded import offloaded_parameters

    runner = runner_of(llm)
    yield
    free, total = torch.cuda.mem_get_info()
    caches = [layer.kv_cache.untyped_storage() for layer in runner.compilation_config.static_forward_context.values()]
    layers = {int(re.search(r"\.(\d+)\.", name)[1]) for name in offloaded_parameters(runner.model)}
    return {
        "used": total - free,
        "kv_cache": sum({s.data_ptr(): s.nbytes() for s in caches}.values()),
        "offloaded_layers": sorted(layers),
    }


def cost(llm):
    """GPU memory in bytes when the requests are done: tensors alive, the most there were at once since the model was
    loaded, and everything that this process and others have, without what torch keeps for later; and the substitutes."""
    runner = runner_of(llm)
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "alive": torch.cuda.memory_allocated(), "most": torch.cuda.max_memory_allocated(), "used": total - free,
        "substitutes": 0 if runner.speculator is None else substitute_bytes(runner.model, runner.speculator.model),
    }  # fmt: skip


def substitute_bytes(target, draft) -> int:
    """Bytes of the tensors that the draft has and the target has not."""
    of_target = {tensor.data_ptr() for tensor in target.parameters()}
    kernels = [m.quant_method.weights for m in draft.modules() if hasattr(getattr(m, "quant_method", None), "weights")]
    tensors = [tensor for module in (draft, *kernels) for tensor in module.parameters()]
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in of_target}.values())


class Late:
    """A captured draft step that the GPU or the host is late with, at random."""

    def __init__(self, graph, rnd: random.Random):
        self.graph, self.rnd = graph, rnd

    def replay(self) -> None:
        who = self.rnd.choice(["gpu", "host", "nobody"])
        if who == "gpu":
            torch.cuda._sleep(self.rnd.randrange(4_000_000))  # cycles: up to 2 ms
        if who == "host":
            time.sleep(self.rnd.random() / 500)
        self.graph.replay()


def delayed(llm):
    """Of a greedy and of a sampled request its rounds, [tree size, accepted] each: undisturbed, then five times with
    delays; by confidence_threshold."""
    from prompts import CHAT
    from vllm import SamplingParams

    speculator, rnd = runner_of(llm).speculator, random.Random(0)
    params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=128, detokenize=False) for temperature in (0.0, 0.8)
    ]

    def rounds(params):
        llm.chat([{"role": "user", "content": CHAT[0]}], params, use_tqdm=False)
        return [[r["tree_size"], r["accepted"]] for r in llm.collective_rpc("subspec_rounds")[0]]

    yield
    found = {}
    for threshold in (0.2, 0.5):
        tree = speculator.tree_width, speculator.tree_depth
        llm.collective_rpc("subspec_set_tree", args=tree, kwargs={"confidence_threshold": threshold})
        found[threshold] = [[rounds(each) for each in params]]
        speculator.graph = {sampled: Late(graph, rnd) for sampled, graph in speculator.graph.items()}
        found[threshold] += [[rounds(each) for each in params] for _ in range(5)]
    return found


class Buffers(TorchFunctionMode):
    """Watches how large the largest tensor is that is asked for by its size."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.zeros, torch.ones, torch.empty, torch.full):
            self.largest = max(self.largest, made.nbytes)
        return made


def worker_calls(llm):
    """What a caller of reload_weights is told, and what a worker extension says."""
    try:
        llm.collective_rpc("reload_weights")
    except Exception as error:
        told = str(error)
    yield
    return [told, *llm.collective_rpc("model_class")]


def traced(llm):
    """Every round's tree, by the RPC that callers use."""
    llm.collective_rpc("subspec_trace", args=(True,))
    yield
    return llm.collective_rpc("subspec_trace", args=(False,))[0]


def joined(llm):
    """A request that another joins when its next tree was asked for: draft rows of steps with several requests, the
    rounds, and how many drafts vLLM counted."""
    from vllm import SamplingParams

    yield
    runner, engine, rows = runner_of(llm), llm.llm_engine, []
    counted = lambda: {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts"}  # noqa: E731
    sample, (before,) = runner.sample, counted().values()

    def record(hidden_states, input_batch, grammar_output):
        if input_batch.num_reqs > 1:
            rows.append(input_batch.num_draft_tokens)
        return sample(hidden_states, input_batch, grammar_output)

    runner.sample = record
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    engine.add_request("first", {"prompt_token_ids": [5, 6, 7]}, params)
    engine.step()
    engine.add_request("second", {"prompt_token_ids": [8, 9]}, params)
    while engine.has_unfinished_requests():
        engine.step()
    (after,) = counted().values()
    return {"rows": rows, "rounds": llm.collective_rpc("subspec_rounds")[0], "drafts": after - before}
