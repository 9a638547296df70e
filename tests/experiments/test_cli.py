"""The command line from outside: exit codes, messages, signals."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import tyro
from helpers import cache_folder, compilation_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = {"dim": 16, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 8, "mlp-dim": 32, "devices": 2}
RUN = {"rollouts": 64, "batch-size": 8, "slots": 8, "eval-tasks": 16, "checkpoint-every": 2}
WARM_START = {"warm-start-steps": 5, "warm-start-batch": 8, "demonstrations": 50}
PREHEAT = {"preheat-rollouts": 16, "preheat-epochs": 2}


def flags(*groups):
    return [item for group in groups for name, value in group.items() for item in (f"--{name}", str(value))]


TINY = flags(MODEL, RUN, WARM_START, PREHEAT)


@pytest.fixture
def environment(request):
    return os.environ | compilation_environment(cache_folder(request.config)) | {"JAX_PLATFORMS": "cpu"}


def call(*arguments, environment, timeout=600, cwd=ROOT):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def train(*arguments, environment, **options):
    return call("-m", "experiments.train", *arguments, environment=environment, **options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dual-clipp", "3.0"], "--dual-clipp"),
        (["--lr", "fast"], "--lr"),
        (["--preset", "papers"], "--preset"),
        (["--band", "0.1,10", "--eps-low", "0.3", "--eps-high", "5"], "error: --band and --eps-low/--eps-high both"),
        (["--eps-low", "0.3"], "error: --eps-low and --eps-high go together"),
        (["--preset", "grpo", "--critic-lr", "0.1"], "error: --critic-lr has no effect here"),
        (["--batch-size", "0"], "error: --batch-size is 0; it must be at least 1"),
        (["--lr", "nan"], "error: --lr is nan; it must be finite"),
        (["--temperature", "-1"], "error: --temperature is -1.0"),
        (["--preset", "grpo", "--n-samples-per-prompt", "1"], "needs groups of at least 2"),
        (["--task", "calculater"], "error: unknown task 'calculater'; allowed: arithmetic, calculator"),
        (["--task", "calculator:levell=2"], "has no option 'levell'; allowed:"),
        (["--max-tokens", "100000"], "error: --max-tokens is 100000; task 'calculator' allows"),
        (["--max-tokens", "5"], "leave no room for an action; --max-tokens must be at least"),
        (["--env-workers", "2"], "error: --env-workers has no effect here"),
        (["--init-from", "nowhere"], "error: --init-from nowhere: no such folder"),
        (["--resume", "nowhere"], "error: nowhere is not a run folder"),
        (["--replay", "nowhere"], "error: nowhere is not a run folder"),
        (["--resume", "a", "--replay", "b"], "exclude each other"),
        (["--resume", "a", "--lr", "0.1"], "error: --lr: a run is continued or replayed with the flags"),
        (["--resume", "a", "--batch-size", "64"], "error: --batch-size: a run is continued or replayed with the flags"),
        (["--resume=a", "--batch_size=64"], "error: --batch-size: a run is continued or replayed with the flags"),
        (["--replay", "a", "--rollouts", "12000"], "error: --rollouts: a run is continued or replayed with the flags"),
        (["--resume", "a", "--run-dir", "b"], "error: --run-dir has no effect with --resume"),
        (["--replay", "a", "--tensorboard"], "error: --tensorboard has no effect with --replay"),
        (["--resample"], "error: --resample has no effect here; it needs --replay"),
        (["--freeze-critic", "no/such/*", *TINY], "pattern 'no/such/*' matches no parameter"),
        (
            ["--slots", "7", *[x for x in TINY if x not in ("--slots",)][:12], "--devices", "2"],
            "7 slots cannot be split",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_wrong_wish_is_one_line_and_exit_code_2(arguments, says, environment, tmp_path):
    result = train(*arguments, environment=environment | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert says in " ".join((result.stderr + result.stdout).split())
    assert "Traceback" not in result.stderr
    if says.startswith("error"):
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not (tmp_path / "runs").exists(), "a refused run left a folder"


def test_a_folder_that_holds_a_run_is_not_overwritten(environment, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = train("--run-dir", tmp_path, environment=environment)
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"error: {tmp_path} holds a run already; continue it with --resume {tmp_path}, or name another folder"
    )


def test_a_config_file_with_an_unknown_key_is_named(environment, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dual_clipp": 3.0}))
    result = train("--resume", tmp_path, environment=environment)
    assert (result.returncode, result.stderr.strip()) == (2, "error: config.json has unknown keys: dual_clipp")


def test_a_damaged_config_file_is_named(environment, tmp_path):
    (tmp_path / "config.json").write_text('{"lr": ')
    result = train("--resume", tmp_path, environment=environment)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "config.json" in result.stderr


def test_only_our_own_errors_are_shown_as_one_line(tmp_path):
    """A user's module below a folder with our name is no part of the package."""
    from experiments import _cli

    for path, ours in (
        (tmp_path / "sao_jax" / "task.py", False),
        (tmp_path / "my_experiments.py", False),
        (ROOT / "sao_jax" / "runtime" / "x.py", True),
        (ROOT / "experiments" / "x.py", True),
    ):
        with pytest.raises(ValueError, match="told") as caught:
            exec(compile("raise ValueError('told')", str(path), "exec"))
        assert _cli._is_ours(caught.value) is ours, path


@pytest.mark.parametrize("form", [["-m", "experiments.train"], [ROOT / "experiments" / "train.py"]])
def test_help_is_readable(form, environment, tmp_path):
    cwd = ROOT if form[0] == "-m" else tmp_path
    result = call(*form, "--help", environment=environment, cwd=cwd)
    assert result.returncode == 0, result.stderr
    for flag in ("--task", "--batch-size", "--max-staleness", "--resume", "--replay", "--eps-low", "--critic-lr"):
        assert flag in result.stdout
    assert "at most (S + 1) x batch" in " ".join(result.stdout.replace("│", " ").split())


def test_evaluation_of_nothing_is_refused(environment, tmp_path):
    result = call("-m", "experiments.evaluate", tmp_path, environment=environment)
    assert (result.returncode, result.stderr.strip()) == (
        2, f"error: {tmp_path} is not a run folder: it has no config.json",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--candidates 2", "--candidates has no effect here; it needs --guided"),
        ("--guided best --candidates 1", "--candidates is 1; it must be at least 2"),
        ("--guided best --beam 2", "--beam has no effect here; it needs --guided beam"),
        ("--guided beam --beam 1", "--beam is 1; it must be at least 2 (a beam of width 1 is --guided best)"),
        ("--guided best --greedy", "--greedy and --guided exclude each other: they sample"),
        ("--guided best --budget fixed", "--guided and --budget exclude each other"),
        ("--budget-steps 3", "--budget-steps has no effect here; it needs --budget"),
        ("--budget fixed --patience 2", "--patience has no effect here; it needs --budget dynamic"),
        ("--budget dynamic --budget-tokens 0", "--budget-tokens is 0; it must be at least 1"),
        ("--budget dynamic --drop 1", "drop is 1.0; it must lie in [0, 1)"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused_before_anything_is_read(arguments, says):
    from experiments import evaluate

    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        evaluate.chosen(tyro.cli(evaluate.Flags, args=["run", *arguments.split()]))


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_ends_with_its_figures_and_can_be_evaluated(environment, tmp_path):
    folder = tmp_path / "run"
    result = train("--task", "arithmetic:digits=2", *TINY, "--run-dir", folder, environment=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads((folder / "evaluation.json").read_text())
    assert figures["version"] == 8
    assert figures["rollouts"] == 64 + 16
    assert figures["recompilations"] == 0
    result = call("-m", "experiments.evaluate", folder, "--n", "8", environment=environment)
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.strip().splitlines()[-1])
    assert (last["version"], last["n"]) == (8, 8)
    guided = ("--guided", "beam", "--candidates", "2", "--granularity", "2", "--show", "1")
    for options in (guided, ("--budget", "dynamic", "--patience", "2")):
        result = call("-m", "experiments.evaluate", folder, "--n", "8", *options, environment=environment)
        assert result.returncode == 0, result.stderr
        last = json.loads(result.stdout.strip().splitlines()[-1])
        assert (last["version"], last["n"]) == (8, 8)
        assert last.get("plain", last.get("fixed"))["sampled_tokens"] > 0
    # It is done; a resume has nothing left but to say so, and more rollouts may be asked for.
    result = train("--resume", folder, environment=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the run has ended; nothing is left to do" in result.stdout
    assert "compiling" not in result.stdout
    assert json.loads((folder / "evaluation.json").read_text()) == figures
    result = train("--resume", folder, "--rollouts", "72", environment=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((folder / "evaluation.json").read_text())["rollouts"] == 72 + 16
    # As a kill in the last evaluation would leave it.
    (folder / "evaluation.json").write_text(json.dumps(figures))
    result = train("--resume", folder, environment=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((folder / "evaluation.json").read_text())["rollouts"] == 72 + 16


@pytest.mark.slow
def test_a_constant_reward_ends_with_the_reason(environment, tmp_path):
    task = f"{ROOT}/tests/helpers.py:Tiny:reward=0"
    arguments = ["--task", task, "--preset", "grpo", "--max-dead-groups", 3, "--run-dir", tmp_path / "run"]
    result = train(*arguments, *flags(MODEL, RUN, WARM_START), environment=environment)
    assert result.returncode == 2, result.stderr[-3000:]
    assert "4 groups in a row had equal rewards" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_task_that_always_fails_is_an_error(environment, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from sao_jax.envs.arithmetic import Arithmetic\n"
        "class Broken(Arithmetic):\n"
        "    def respond(self, problem, actions):\n"
        "        raise RuntimeError('no sandbox')\n"
    )
    arguments = ["--task", tmp_path / "broken.py:Broken", "--warm-start-steps", 0, "--run-dir", tmp_path / "run"]
    result = train(*arguments, *flags(MODEL, RUN, PREHEAT), environment=environment)
    assert result.returncode == 2, result.stderr[-3000:]
    said = " ".join(result.stderr.split())
    assert "error: all 16 instances of the evaluation failed in 3 attempts each; the last: environment: Runt" in said


def _lines(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line).get("stage") for line in lines if line.endswith("}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number"),
    [("start", signal.SIGTERM), ("warm_start", signal.SIGTERM), ("preheat", signal.SIGTERM), ("rl", signal.SIGTERM),
     ("rl", signal.SIGINT)],
)  # fmt: skip
def test_a_signal_ends_any_stage_and_the_run_goes_on_later(stage, number, environment, tmp_path):
    folder = tmp_path / "run"
    task = f"{ROOT}/tests/helpers.py:Tiny:turns=2,wait=0.03"
    command = [sys.executable, "-m", "experiments.train", "--task", task, *TINY, "--run-dir", str(folder)]
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 240
        reached = folder.exists if stage == "start" else lambda: stage in _lines(folder)
        while not reached() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(random.Random(stage).uniform(0, 0.2))
        process.send_signal(number)
        code = process.wait(timeout=300)
    text = (tmp_path / "out.txt").read_text()
    assert code == 128 + number, text[-3000:]
    assert "Traceback" not in text
    assert "stopping at the next safe point" in text
    result = train("--resume", folder, environment=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads((folder / "evaluation.json").read_text())
    assert figures["counts"] == {"running": 0, "finished": 0, "trained": 80, "dropped": 0, "handed_out": 80}
    assert figures["version"] == 8
