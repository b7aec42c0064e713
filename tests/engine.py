"""Run requests through a vLLM engine in a process of its own and bring back what it emitted.

    run(jobs, in_process=...)  ->  one answer a job

A job is a dictionary: ``model``, ``engine`` (arguments of LLM), ``batches`` (each a list of requests that are sent
together; a request is ``prompt`` (text, token ids or chat messages) and ``params``), and optionally ``probe``, the
name of a generator function in probes.py that gets the live in-process engine: it runs to its ``yield`` before the
batches, and what it returns after them is part of the answer; ``vram``, the bytes of the GPU that the process may use;
and ``buffers``, whether to tell how large the largest buffer is that the engine's start made. Jobs of one call share a
process: several engines after another in one process are thereby part of every such test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def environment(in_process: bool, subspec_env: bool) -> dict[str, str]:
    """The environment of an engine process: nothing that tests in this process set or took away (see `run`)."""
    from vllm_subspec.tools.bench.process import environment as of_engine

    env = of_engine(subspec_env, cpu=not has_cuda())
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    env["OMP_NUM_THREADS"] = "1"  # as in vLLM's own engine processes; two threads that share a busy core crawl
    return env


def run(jobs: list[dict], in_process: bool = False, subspec_env: bool = False) -> list[dict]:
    """Run jobs in a fresh Python process.

    Args:
        in_process: the engine runs inside that process (faster to start, and probes can reach it)
        subspec_env: set the variables that an in-process engine with subspec needs on CPU; on a GPU it needs none

    Raises:
        RuntimeError: the process failed, or took so long that it hangs; with the end of what it printed.
    """
    env = environment(in_process, subspec_env)
    timeout = 300 * len(jobs) if has_cuda() else 5000
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = Path(directory) / "jobs.json", Path(directory) / "answers.json"
        asked.write_text(json.dumps(jobs))
        done = subprocess.run(
            [sys.executable, str(HERE / "engine.py"), str(asked), str(answered), str(timeout)],
            env=env, capture_output=True, text=True,
        )  # fmt: skip
        if not answered.exists():
            raise RuntimeError(f"the engine process failed:\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}")
        return json.loads(answered.read_text())


def plain(jobs: list[dict]) -> list[dict]:
    """The same jobs on plain vLLM: the runner that it chooses itself, flag off."""
    return run([{k: v for k, v in job.items() if k != "spec"} for job in jobs], in_process=True)


def subspec(jobs: list[dict], **spec) -> list[dict]:
    """The same jobs with subspec, in-process engines."""
    return run([{**job, "spec": {**spec, **job.get("spec", {})}} for job in jobs], in_process=True, subspec_env=True)


def sampling_params(params: dict):
    """SamplingParams from what JSON left of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in params:
        params = {**params, "structured_outputs": StructuredOutputsParams(**params["structured_outputs"])}
    if "logit_bias" in params:
        params = {**params, "logit_bias": {int(token): bias for token, bias in params["logit_bias"].items()}}
    return SamplingParams(**params, detokenize=False)


def scores(logprobs) -> list | None:
    """vLLM's logprobs as JSON: per token its alternatives, [token, logprob, rank] each, in their order."""
    if logprobs is None:
        return None
    return [[[token, entry.logprob, entry.rank] for token, entry in (top or {}).items()] for top in logprobs]


def answer(job: dict) -> dict:
    """Run one job in this process."""
    import gc

    import probes
    from vllm import LLM
    from vllm.config import CompilationMode

    gc.freeze()  # until vLLM's shutdown: it collects garbage ten times an engine, each time through all of torch
    if "vram" in job:
        from vllm_subspec.tools.bench.engine import limit_memory

        limit_memory(job["vram"])
    arguments = dict(dtype="float32", max_model_len=512, max_num_seqs=8, enforce_eager=True, disable_log_stats=False)
    arguments.update(job.get("engine", {}))
    if "tokenizer" not in arguments and not list(Path(job["model"]).glob("tokenizer*")):
        arguments["skip_tokenizer_init"] = True
    if "spec" in job:
        arguments["speculative_config"] = {"method": "subspec", **job["spec"]}
    elif os.environ.get("TRITON_INTERPRET") == "1":  # plain vLLM on the same runner
        from vllm_subspec.cpu.kernels import use_torch_top_k_top_p

        use_torch_top_k_top_p()
    buffers = probes.Buffers() if "buffers" in job else nullcontext()
    with buffers:
        llm = LLM(job["model"], **arguments)
    probe = None
    if "probe" in job:
        probe = getattr(probes, job["probe"])(llm)
        next(probe)
    try:
        batches = []
        for batch in job["batches"]:
            params = [sampling_params(r["params"]) for r in batch]
            prompts = []
            for r in batch:
                prompt = r["prompt"]
                if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
                    encoded = llm.get_tokenizer().apply_chat_template(
                        prompt, add_generation_prompt=True, return_dict=False
                    )
                    prompt = list(encoded)
                prompts.append({"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            batches.append(
                [
                    {
                        "tokens": [list(c.token_ids) for c in o.outputs],
                        "finish": o.outputs[0].finish_reason,
                        "logprobs": [scores(c.logprobs) for c in o.outputs],
                        "prompt_logprobs": scores(o.prompt_logprobs),
                        "counts": [c.spec_decode_metrics and c.spec_decode_metrics.to_dict() for c in o.outputs],
                    }
                    for o in outputs
                ]
            )
        result = {"batches": batches}
        config = llm.llm_engine.vllm_config
        result["num_gpu_blocks"] = config.cache_config.num_gpu_blocks
        result["v2"] = config.use_v2_model_runner
        result["compiled"] = config.compilation_config.mode == CompilationMode.VLLM_COMPILE
        if "buffers" in job:
            result["largest_buffer"] = buffers.largest
        result["metrics"] = {
            m.name: getattr(m, "value", getattr(m, "values", None))
            for m in llm.get_metrics()
            if "spec_decode" in m.name or "preemptions" in m.name
        }
        if "spec" in job:
            result["rounds"] = llm.collective_rpc("subspec_rounds")[0]
        if probe is not None:
            try:
                next(probe)
            except StopIteration as end:
                result["probe"] = end.value
        return result
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


if __name__ == "__main__":
    import faulthandler

    sys.path.insert(0, str(HERE))
    faulthandler.dump_traceback_later(int(sys.argv[3]), exit=True)
    answers = [answer(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(answers))
