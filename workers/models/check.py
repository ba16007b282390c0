"""Asks a prepared model one question on the CPU: `python -m workers.models.check FOLDER`.

Runs in the engine's environment, the one that has torch and transformers. Prints the answer;
ends with 1 where it lacks the expected word.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from workers.core.errors import ConfigError

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
_ANSWER_TOKENS = 16
_TIMEOUT_SECONDS = 300.0
_PROJECT_ROOT = Path(__file__).resolve().parents[2]


def greedy_answer(folder: Path, question: str) -> str:
    """The model's greedy answer through its chat template, in float32."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=_ANSWER_TOKENS, do_sample=False)
    answer = tokenizer.decode(outputs[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(answer).strip()


def check_answer(folder: Path, engine_python: str) -> str:
    """Ask in `engine_python` and return the answer. Raises ConfigError where it is not right."""
    environment = dict(os.environ)
    paths = [str(_PROJECT_ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["HF_HUB_OFFLINE"] = "1"
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter is the operator's own choice
            [engine_python, "-m", "workers.models.check", str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            "engine python", engine_python, f"it cannot be run: {error}", "Pass --engine-python"
        ) from error
    answer = done.stdout.strip()
    if done.returncode == 0:
        return answer
    if answer:
        raise ConfigError(
            f"answer to {QUESTION!r}",
            answer,
            f"it lacks {EXPECTED!r}, so the prepared weights or tokenizer are wrong",
            f"Delete {folder} and prepare it again",
        )
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise ConfigError(
        "engine python",
        engine_python,
        f"the check could not run: {last}",
        "It needs torch and transformers: pass the engine's interpreter with --engine-python",
    )


def main() -> int:
    answer = greedy_answer(Path(sys.argv[1]), QUESTION)
    sys.stdout.write(answer + "\n")
    return 0 if EXPECTED in answer else 1


if __name__ == "__main__":
    sys.exit(main())
