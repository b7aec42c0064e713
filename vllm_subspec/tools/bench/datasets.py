"""Prompts: our own, shipped with the package, and those of public datasets from files as their authors publish them.

vLLM's own readers (`vllm.benchmarks.datasets`) do not serve here. Those of MT-Bench, HumanEval, GSM8K and AIMO load from
the hub, through a package that vLLM does not install, and cannot read a file; those that read one (`SpecBench`,
`CustomDataset`, by pandas) give one turn a conversation where MT-Bench has two, know no dataset's prompt template, and
read no .gz, .json, .csv or .parquet. The other datasets here they do not have.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..prompts import PROMPTS

OWN = ("chat", "code", "math", "instruction", "summarization")
"""Kinds of prompts that ship with the package"""
SIX = "six"
"""The six prompts of the demo and of the figures for acceptance length"""

Turns = list[str]
"""User messages of one conversation, in order"""


@dataclass(frozen=True)
class Dataset:
    """A public dataset: where its files come from and how a row becomes a prompt."""

    source: str
    fields: tuple[str, ...]
    """Columns that the template reads; names compare without case"""
    turns: Callable[[dict, random.Random], Turns]


def _gpqa(row: dict, rng: random.Random) -> Turns:
    options = [row["correct answer"], *(row[f"incorrect answer {i}"] for i in (1, 2, 3))]
    rng.shuffle(options)
    listed = "\n".join(f"{letter}) {option.strip()}" for letter, option in zip("ABCD", options))
    return [
        "Answer the following multiple choice question. The last line of your response should be of the following "
        "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
        f"\n\n{row['question'].strip()}\n\n{listed}"
    ]


def _livecodebench(row: dict, rng: random.Random) -> Turns:
    if row.get("starter_code"):
        how = (
            "You will use the following starter code to write the solution to the problem and enclose your code within "
        )
        how += f"delimiters.\n```python\n{row['starter_code']}\n```"
    else:
        how = (
            "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the "
        )
        how += "sample inputs). Enclose your code within delimiters as follows.\n```python\n# YOUR CODE HERE\n```"
    return [
        "You will be given a question (problem specification) and will generate a correct Python program that matches "
        f"the specification and passes all tests.\n\nQuestion: {row['question_content']}\n\n{how}"
    ]


def _step_by_step(field: str) -> Callable[[dict, random.Random], Turns]:
    return lambda row, rng: [f"{row[field]}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def _alpaca(row: dict, rng: random.Random) -> Turns:
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


def _humaneval(row: dict, rng: random.Random) -> Turns:
    return [
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        f"```python\n{row['prompt'].strip()}\n```"
    ]


DATASETS = {
    "mt_bench": Dataset("FastChat's question.jsonl", ("turns",), lambda row, rng: list(row["turns"])),
    "humaneval": Dataset("OpenAI's HumanEval.jsonl.gz; template of EvalPlus", ("prompt",), _humaneval),
    "gsm8k": Dataset("OpenAI's test.jsonl; template of Qwen2.5-Math", ("question",), _step_by_step("question")),
    "alpaca": Dataset("Stanford's alpaca_data.json", ("instruction",), _alpaca),
    "cnn_dm": Dataset(
        "CNN/Daily Mail 3.0.0", ("article",), lambda row, rng: [f"Summarize the following article.\n\n{row['article']}"]
    ),
    "aime2024": Dataset("AIME 2024; template of Qwen2.5-Math", ("problem",), _step_by_step("problem")),
    "math500": Dataset("OpenAI's MATH-500; template of Qwen2.5-Math", ("problem",), _step_by_step("problem")),
    "gpqa_diamond": Dataset(
        "gpqa_diamond.csv; template of OpenAI's simple-evals",
        ("question", "correct answer", "incorrect answer 1", "incorrect answer 2", "incorrect answer 3"),
        _gpqa,
    ),
    "livecodebench": Dataset(
        "code_generation_lite's test*.jsonl; its own template", ("question_content",), _livecodebench
    ),
}


def read_rows(path: Path) -> list[dict]:
    """Rows of a .jsonl, .json (a list), .csv or .parquet file; .gz of the first three.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another kind of file, or one that does not parse.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    try:
        if kind == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        if kind == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        if kind == ".json":
            return json.loads(text)
        if kind == ".csv":
            return list(csv.DictReader(io.StringIO(text, newline="")))
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as {kind[1:]}: {error}") from None
    raise ValueError(f"{path} is none of .jsonl, .json, .csv, .parquet")


def load(name: str, path: str | None = None, samples: int | None = None, seed: int = 0) -> list[Turns]:
    """Prompts of one benchmark.

    Args:
        name: one of `OWN`, `SIX`, or one of `DATASETS` with the path of its file
        samples: how many, chosen by ``seed``; None or more than there are: all, in the file's order

    Raises:
        FileNotFoundError: a dataset's file is missing.
        ValueError: an unknown name, a path where none belongs, or a file in another format.
    """
    if name in (*OWN, SIX):
        if path is not None:
            raise ValueError(
                f"{name} ships with the package and takes no file; give a file to one of {_names(DATASETS)}"
            )
        own = yaml.safe_load((Path(__file__).parent / "prompts.yaml").read_text())
        prompts = {**own, SIX: [[prompt] for prompt in PROMPTS]}[name]
    elif name in DATASETS:
        if path is None:
            raise ValueError(f"{name} needs its file ({DATASETS[name].source}): {name}=PATH")
        prompts = _read_prompts(name, Path(path).expanduser(), random.Random(seed))
    else:
        raise ValueError(
            f"there is no benchmark {name!r}; choose from {_names((*OWN, SIX))}, or with =PATH from {_names(DATASETS)}"
        )
    if samples is None or samples >= len(prompts):
        return prompts
    return random.Random(seed).sample(prompts, samples)


def _read_prompts(name: str, path: Path, rng: random.Random) -> list[Turns]:
    dataset, prompts = DATASETS[name], []
    rows = read_rows(path)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        row = {key.lower(): value for key, value in row.items()} if isinstance(row, dict) else {}
        missing = [field for field in dataset.fields if not row.get(field)]
        if missing:
            found = ", ".join(row) or "no fields"
            raise ValueError(f"{path} is not {name}: row {number} has no {missing[0]!r} (it has {found})")
        prompts.append(dataset.turns(row, rng))
    return prompts


def _names(names) -> str:
    return ", ".join(names)
