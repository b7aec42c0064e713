"""`vllm-subspec serve`: `vllm serve`, with what the user did not say filled in.

vLLM's own parser reads the command line, so all of its spellings (a file, dots, underscores, short and abbreviated
options) mean what they mean there. What the plan adds is parsed by it as well, and goes where the user gave nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
from argparse import SUPPRESS, Namespace
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NoReturn

import yaml
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG, cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ..cpu.platform import is_cpu_build
from .plan.advise import Plan
from .plan.gpu import Gpu
from .plan.host import ALLOCATOR_VARIABLES, EXACT, WSL_LIMIT, can_be_exact, needed, obstacles, this_host, will_be_exact
from .plan.report import capitalized, cpu_memory, first_token
from .plan.serve import fits_with_defaults, flags, is_subspec, plan_for, speculation, whole_gpu
from .plan.speed import Bandwidth, expect, survey
from .sizes import parse_size

TAUS = [8.0, 20.0]
"""Acceptance lengths of which speeds are said: hard prompts for small models, easy ones for large models"""
SPECULATION = {"speculative_config", "spec_method", "spec_model", "spec_tokens"}
"""Options that say a part of the speculative config"""
NO_GPU = "No GPU here, so nothing is offloaded: speculation shows how it works, and is slower than plain vLLM."


class Parser(FlexibleArgumentParser):
    """vLLM's, but it raises ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"cannot be converted to <function loads.*", "is not JSON", message))


def prepare(words: list[str]) -> Namespace:
    """vLLM's options for a command line; says what was decided.

    Raises:
        FileNotFoundError, ValueError: it cannot work; one sentence.
    """
    args, given = parse(words)
    if args.config is not None:  # vLLM takes out what it has read
        raise ValueError("vLLM reads --config only with its file as a word of its own; write --config FILE")
    if not given & {"model_tag", "model"}:
        raise ValueError("no model is given; put it first, or write it into the file of --config")
    args.model = args.model_tag or args.model
    args.subparser = ServeSubcommand.name
    _decide(args, given)
    return args


def start(args: Namespace) -> None:
    """Serve, as vLLM's command line does. That command does not start on CPU builds: it looks for the version of a
    distribution named `vllm`."""
    cli_env_setup()
    configure_logging_from_args(args)
    subcommand = ServeSubcommand()
    subcommand.validate(args)
    subcommand.cmd(args)


def parse(words: list[str]) -> tuple[Namespace, set[str]]:
    """All options of `vllm serve`, and the names of those that the words give, or a file that they name.

    Raises:
        OSError, ValueError: vLLM does not understand them.
    """
    parser = _parser()
    try:
        args = parser.parse_args(words)
        for action in parser._actions:
            action.default = SUPPRESS
        with _quiet():
            return args, set(vars(parser.parse_args(words)))
    except (AssertionError, AttributeError, yaml.YAMLError) as error:  # of vLLM's reader of files
        raise ValueError(f"the file of --config cannot be read: {' '.join(str(error).split())}") from None


def _parser() -> Parser:
    parser = make_arg_parser(
        Parser(
            prog="vllm-subspec serve",
            usage="vllm-subspec serve MODEL [options of `vllm serve`]",
            description="vLLM's OpenAI server, with as many layers offloaded as needed and the method on.",
            epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd="serve").replace("vllm serve", "vllm-subspec serve"),
        )
    )
    group = parser.add_argument_group("vllm-subspec", "What is planned: see `vllm-subspec plan`.")
    group.add_argument("--vram", metavar="SIZE", help="GPU memory to plan for, as 8GiB; by default all that is free")
    group.add_argument("--fastest", action="store_true", help="the plan that `vllm-subspec plan --fastest` prints")
    return parser


@contextmanager
def _quiet():
    """Without what vLLM logs: it has been said once."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _decide(args: Namespace, given: set[str]) -> None:
    """Fill in what the user left open: a plan where the model does not fit, the method where something is offloaded."""
    asked = args.vram is not None or args.fastest
    own_offloading = sorted(name for name in given if name.startswith(("offload_", "cpu_offload_")))
    if asked and is_cpu_build():
        raise ValueError("--vram and --fastest plan GPU memory, and this is vLLM's CPU build; leave them out")
    if asked and own_offloading:
        option = f"--{own_offloading[0].replace('_', '-')}"
        raise ValueError(f"--vram and --fastest plan the offloading itself; remove {option}, or those two")
    if not asked and not is_subspec(speculation(args)):
        return
    if own_offloading and not is_cpu_build():
        _say("Offloading is as you say; the method is added.")
        _pin_exactly()
        return _speculate(args)
    gpu, links = (None, ()) if is_cpu_build() else _in_a_process_of_its_own(survey)
    if gpu is None and args.vram is None:
        _say(NO_GPU)
        return _speculate(args)
    vram = whole_gpu(args, given, gpu) if args.vram is None else parse_size(args.vram)
    plan = plan_for(args, given, vram, gpu, links, args.fastest)
    if plan.placement is None:
        _resident(args, given, plan, gpu)
    else:
        _streamed(args, given, plan, gpu, links)


def _in_a_process_of_its_own(function):
    """Its result. What it takes of the GPU, a CUDA context of some hundred MiB, goes with the process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function).result()


def _resident(args: Namespace, given: set[str], plan: Plan, gpu: Gpu | None) -> None:
    """Every layer fits: nobody should speculate then, but who asks for it may."""
    if given & SPECULATION:
        if args.vram is not None:
            raise ValueError(f"{plan.summary()}; remove --speculative-config, or --vram")
        _say(f"{plan.summary()}. Your speculative config is kept.")
        return _speculate(args)
    _say(f"{plan.summary()}.")
    if args.vram is None and fits_with_defaults(plan, args, gpu):
        return _say("It starts without speculation, as `vllm serve` would start it.")
    _say(f"It starts without speculation, for one request of at most {plan.run.context} tokens at a time.")
    _fill_in(args, given, flags(plan, given, gpu))


def _streamed(
    args: Namespace, given: set[str], plan: Plan, gpu: Gpu | None, links: tuple[Bandwidth, Bandwidth]
) -> None:
    host = this_host()
    need = needed(plan, will_be_exact())
    for obstacle in obstacles(need, host):
        raise ValueError(f"{plan.model.name} would not start: {obstacle}")
    expected = expect(plan, *links, TAUS)
    (slow, times), (fast, _) = expected.by_tau.values()
    _say(f"{plan.summary()}.")
    _say(
        f"Expect {_speed(slow)} to {_speed(fast)} tokens/s, of {TAUS[0]:.0f} to {TAUS[1]:.0f} tokens a pass "
        f"({_speed(slow / times)} without speculation); {first_token(expected)}."
    )
    _say(f"{cpu_memory(need, host)}.")
    for note in (plan.without_kernel and capitalized(plan.without_kernel) + ".", host.wsl and WSL_LIMIT):
        if note:
            _say(note)
    _pin_exactly()
    _fill_in(args, given, flags(plan, given, gpu))
    _speculate(args)


def _speed(tokens: float) -> str:
    return f"{tokens:.0f}" if tokens >= 10 else f"{tokens:.1f}"


def _fill_in(args: Namespace, given: set[str], words: list[str]) -> None:
    """Set the options that the words give and the user did not."""
    more, added = parse(words)
    for name in added - given:
        setattr(args, name, getattr(more, name))


def _speculate(args: Namespace) -> None:
    """The method, beside what else the user said of speculation."""
    args.speculative_config = {"method": "subspec"} | (args.speculative_config or {})


def _pin_exactly() -> None:
    """Have torch pin no more memory than it is asked for, in the engine's process."""
    if can_be_exact():
        os.environ[ALLOCATOR_VARIABLES[0]] = EXACT


def _say(line: str) -> None:
    print(line, flush=True)
