"""Ablations: what the cells are, and what the tables say of known curves."""

import csv
import dataclasses
import io
import json
import math
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import _claims
from experiments import ablate as module
from experiments._ablations import METHODS, PRESETS
from experiments._cli import UserError
from experiments.ablate import Cell as Run
from experiments.ablate import arguments, cell_flags, cells, run_name, warm_flags
from sao_jax.envs.registry import make_family
from sao_jax.report import comparison, comparison_figures, comparison_tables
from sao_jax.report.comparison import Cell
from sao_jax.report.intervals import mean_interval
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.signals import GracefulStop

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_is_a_configuration_without_idle_options(name, quick):
    preset = PRESETS[name]
    for cell in cells(preset, preset.methods, seeds=1):
        flags = cell_flags(preset, cell, preset.budget, quick)
        config = RunConfig(**flags, init_from="somewhere").resolved()
        paid = config.rollouts + (config.preheat_rollouts or 0)
        assert paid == preset.budget, "preheating counts in the budget"
        RunConfig(**warm_flags(flags["task"], cell.seed, quick)).resolved()
        if not make_family(flags["task"]).fast:
            assert "env_seconds" not in flags, "simulated times need a task that answers at once"


def test_every_method_belongs_to_a_preset_and_every_preset_has_its_reference():
    assert set(METHODS) == {m for p in PRESETS.values() for m in p.methods}
    assert all(p.reference in p.methods for p in PRESETS.values())


def names(name, **options):
    preset = PRESETS[name]
    return {
        c: run_name(c, cell_flags(preset, c, preset.budget, False)) for c in cells(preset, preset.methods, **options)
    }


def test_cells_are_whole_seeds():
    per_seed = len(cells(PRESETS["band"], PRESETS["band"].methods, seeds=1))
    assert [c.seed for c in names("band", seeds=2, first=7)] == [7] * per_seed + [8] * per_seed
    assert arguments({"eps_low": 0.2, "task": "calculator"}) == ["--eps-low", "0.2", "--task", "calculator"]


def test_a_run_is_named_by_what_it_is_and_shared_by_presets():
    everything: dict[str, set] = {}
    for name, preset in PRESETS.items():
        for cell, folder in names(name, seeds=2).items():
            flags = cell_flags(preset, cell, preset.budget, False)
            everything.setdefault(folder, set()).add((cell.method, tuple(sorted(flags.items(), key=str))))
    assert all(len(runs) == 1 for runs in everything.values()), "one folder, two different runs"
    assert (
        names("dis-vs-grpo", seeds=1)[Run("sao", (), 0)] == names("components", seeds=1)[Run("sao", (), 0)] == "sao_s0"
    )
    assert names("math", seeds=1)[Run("grpo", (), 0)] == "grpo_task=mathword-level=1_s0"
    flags = cell_flags(PRESETS["dis-vs-grpo"], Run("sao", (), 3), 2048, False)
    assert run_name(Run("sao", (), 3), flags) == "sao_rollouts=1536_s3"


def cell(method, seed, success, clock=(0, 10, 20, 30), **options):
    n = len(success)
    health = dict.fromkeys(comparison.HEALTH, 0.5)
    return Cell(
        method, {}, seed, rollouts=100.0 * np.arange(n), clock=np.array(clock[:n], float),
        success=np.array(success), n=64, measured=n, health=health, **options,
    )  # fmt: skip


def test_tokens_outside_the_band_are_told_by_the_sign_of_their_advantage():
    runs = [cell("sao", s, [0.2, 0.4], outside={"above_pos": 0.001, "above_neg": 0.003 * s, "below_pos": math.nan,
                                                "below_neg": 0.0}) for s in range(2)]  # fmt: skip
    assert "| sao | 0.100 % | 0.150 % | - | 0.000 % |" in comparison_tables.summary(runs, "sao")
    assert "by the sign" not in comparison_tables.summary(runs[:1], "sao"), "nothing was above"
    (line,) = csv.DictReader(io.StringIO(comparison.runs_csv(runs[1:])))
    assert (line["above_neg"], line["below_pos"]) == ("0.003", "nan")


def test_figures_of_a_curve():
    c = cell("a", 0, [0.2, 0.6, 0.4, 0.8])
    assert c.final == 0.8
    assert c.area == pytest.approx((0.4 + 0.5 + 0.6) / 3)
    assert c.at(15) == pytest.approx(0.5)
    assert c.reaches(0.6) == pytest.approx(250), "one evaluation above is not enough, unless it is the last"
    assert c.reaches(0.4) == pytest.approx(50)
    assert c.reaches(0.4, "clock") == pytest.approx(5)
    assert c.reaches(0.1) == 0
    assert c.reaches(0.9) is None
    assert c.fell_at is None


@pytest.mark.parametrize(
    ("success", "fell"),
    [
        ([0.3, 0.8, 0.39, 0.2], 2),
        ([0.3, 0.8, 0.3, 0.41], None),
        ([0.9, 0.5, 0.44, 0.44], 2),
        ([0.0, 0.0], None),
        ([0.9, 0.0], None),
        ([0.4, 0.0, 0.0, 0.0], 1),
    ],
)
def test_a_collapse_is_a_fall_under_half_of_the_best_that_lasts(success, fell):
    assert cell("a", 0, success).fell_at == fell


def test_effects_are_paired_by_seed_and_censored_runs_count():
    grpo = [cell("grpo", s, [0.2, 0.4, 0.5, 0.6 + s / 10], clock=(0, 20, 40, 60)) for s in range(3)]
    sao = [cell("sao", s, [0.2, 0.5, 0.7, 0.7 + s / 10]) for s in range(3)] + [cell("sao", 9, [0.2] * 4)]
    table = {r["method"]: r for r in comparison.rows(sao + grpo, "grpo")}
    assert table["sao"]["effect"] == pytest.approx((0.1, 0.1, 0.1))
    assert table["sao"]["clock_ratio"] == pytest.approx((0.5, 0.5, 0.5))
    assert table["sao"]["level"] == pytest.approx(0.95 * 0.7)
    assert (table["sao"]["reached"], table["sao"]["seeds"]) == (3, 4)
    assert table["sao"]["steps"] == pytest.approx(100 + 100 * 0.165 / 0.2)
    assert table["grpo"]["reached"] == 2
    assert table["grpo"]["steps"] == pytest.approx(200 + 100 * 0.165 / 0.2)
    assert table["grpo"]["equal_clock"] == 30
    assert table["grpo"]["at_clock"][0] == pytest.approx(0.45)
    assert "effect" not in table["grpo"]


def test_the_summary_and_the_csv_tell_what_is_missing(tmp_path):
    half = dataclasses.replace(cell("sao", 1, [0.9, 0.9]), error="it broke")
    runs = [cell("grpo", 0, [0.2, 0.5, 0.6]), cell("sao", 0, [0.2, 0.6, 0.2]), half]
    paths = comparison_tables.write(tmp_path, runs, reference="grpo")
    assert [p.name for p in paths] == ["runs.csv", "curves.csv", "summary.md", "curves.png"]
    text = (tmp_path / "summary.md").read_text()
    assert "- sao, seed 1: it broke" in text
    assert "| sao | 1 | 20.0 % |" in text
    lines = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    assert [(r["method"], r["final"], r["collapsed_at"], r["error"]) for r in lines] == [
        ("grpo", "0.6", "", ""), ("sao", "0.2", "200", ""), ("sao", "0.9", "", "it broke"),
    ]  # fmt: skip


def test_curves_are_read_back(tmp_path):
    runs = [cell("grpo", 0, [0.25, 0.5, 0.625]), dataclasses.replace(cell("sao", 3, [0.25, 0.75]), point={"lr": 0.001})]
    comparison_tables.write(tmp_path, runs, reference="grpo")
    again = comparison.read_curves(tmp_path / "curves.csv")
    assert [(c.label, c.seed, c.n) for c in again] == [("grpo", 0, 64), ("sao, lr 0.001", 3, 64)]
    for a, b in zip(again, runs, strict=True):
        np.testing.assert_array_equal(a.success, b.success)
        np.testing.assert_array_equal(a.clock, b.clock)
    assert comparison.rows(again, "grpo")[0]["final"][0] == 0.625


@pytest.mark.parametrize("point", [{"lr": 1e-3}, {"forced_staleness": 4, "lr": 1e-3}])
def test_a_grid_is_drawn_by_its_values(tmp_path, point):
    runs = [
        dataclasses.replace(cell(m, s, [0.2, 0.5, 0.6 + s / 10]), point=point | {"lr": lr})
        for m in ("grpo", "sao") for s in range(2) for lr in (1e-3, 3e-3)
    ]  # fmt: skip
    assert [p.name for p in comparison_tables.write(tmp_path, runs, reference="grpo")][-1] == "sweep.png"
    figure = comparison_figures.sweep(runs)
    first, last = figure.axes[0], figure.axes[-1]
    assert [t.get_text() for t in last.get_xticklabels()] == (["4"] if len(point) == 2 else ["0.001", "0.003"])
    np.testing.assert_allclose(first.containers[0].lines[0].get_ydata(), 0.65)
    assert comparison_figures.sweep([]).axes


def test_a_comparison_of_nothing_is_no_crash(tmp_path):
    assert comparison_tables.write(tmp_path / "new", [Cell("sao", {}, 0, error="not run")], reference="grpo")


def test_mean_interval_is_students():
    mean, low, high = mean_interval([1.0, 2.0, 3.0, math.nan])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert mean_interval([5.0])[0] == 5.0
    assert math.isnan(mean_interval([5.0])[1])
    assert math.isnan(mean_interval([])[0])


@pytest.mark.parametrize(
    ("effect", "reported", "expected"),
    [((50, 40, 60), 58, "yes"), ((30, 10, 50), 58, "partly"), ((30, -1, 61), 58, "no"), ((-5, -9, -1), 58, "no"),
     ((70, 65, 75), 58, "yes"), ((0.5, 0.4, 0.6), 60, "no"), ((99, 98, 100), 100, "yes"),
     ((60, math.nan, math.nan), 58, "yes"), ((5, 1, 9), None, "yes"), ((5, -1, 9), None, "no")],
)  # fmt: skip
def test_verdicts(effect, reported, expected):
    null = {60: 1.0, 100: 90.0}.get(reported, 0.0)
    assert _claims.verdict(effect, reported, null) == expected


def test_what_is_saved_has_no_division_by_nothing():
    assert _claims._saved([50.0, 0.0, 0.0], [100.0, 100.0, 0.0]) == [50.0, 100.0, 0.0]
    assert _claims._rollouts_to(cell("a", 0, [0.9, 0.9]), 0.5) == 0.0


def test_a_claims_record_has_its_keys_and_is_json(tmp_path):
    from experiments import claims

    line = claims.measure("action-only", _claims.Request(True, tmp_path, lambda: None))
    keys = {"claim", "reported", "reported_baseline", "measured", "measured_baseline", "interval", "unit", "reproduced",
            "command", "sizes", "seeds"}  # fmt: skip
    assert keys <= set(line)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert all(math.isfinite(x) for x in (line["effect"], *line["interval"]))
    for share in (20, 40, 60, 80):  # by the compiler's count they are what is left out, up to what has no length
        saved = line["notes"][f"{share}% observations, vocabulary 8,192: saved, %"]
        assert saved["FLOPs of head, loss, recursion"] == pytest.approx(share, abs=1.5)
        assert saved.keys() == {
            "FLOPs of head, loss, recursion", "time of head, loss, recursion", "time of an update"
        }  # fmt: skip
    assert "`action-only`" in claims.table(tmp_path, quick=True)


def test_a_claim_that_cannot_be_measured_does_not_keep_the_others_from_it(tmp_path, monkeypatch, capsys):
    from experiments import claims

    def broken(asked):
        raise ValueError("no runs")

    def measured(asked):
        return _claims.Measured((2.0, 1.0, 3.0), 4.0, 2.0, [0, 1], {})

    made = {n: _claims.Claim(n, None, None, 2.5, "points", m) for n, m in (("first", broken), ("second", measured))}
    monkeypatch.setattr(_claims, "CLAIMS", made)
    monkeypatch.setattr("sao_jax.runtime.devices.prepare_backend", lambda: None)
    monkeypatch.setattr(sys, "argv", ["claims", "--all", "--results", str(tmp_path)])
    with pytest.raises(UserError, match="1 of 2 claims could not be measured: first: no runs"):
        claims.main(GracefulStop())
    text = (tmp_path / "claims.md").read_text()
    assert "| `second` | 2.5 points | 4 vs 2 | 2.0 [1.0, 3.0] points | yes | 2 |" in text
    assert "first" not in text
    assert '"claim": "second"' in capsys.readouterr().out


def line(stage, step, **keys):
    return {"stage": stage, "step": step, "version": step, **keys}


def evaluation(step, clock, sampled, success, **keys):
    return line("eval", step, clock_s=clock, sampled=sampled, **{"eval/success": success, "eval/n": 64}, **keys)


def read(folder, lines, **config):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "evaluation.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    return comparison.read_cell(folder, "sao", {}, 0)


@pytest.mark.parametrize(
    ("config", "before", "paid"),
    [(dict(preheat_rollouts=512), [line("preheat", 0, clock_s=8.0)], 512), (dict(preheat_rollouts=512), [], 512),
     (dict(preheat_rollouts=0), [line("critic_only", 0, clock_s=8.0, rollouts=256)], 256), ({}, [], None)],
)  # fmt: skip
def test_what_the_critic_costs_is_paid_before_the_policy_moves(tmp_path, config, before, paid):
    lines = [evaluation(0, 1.0, 0, 0.3), *before, line("rl", 1, clock_s=9.0), evaluation(8, 20.0, 1024, 0.5),
             evaluation(8, 20.0, 1024, 0.9, **{"eval/greedy": True})]  # fmt: skip
    c = read(tmp_path, lines, **config)
    assert c.rollouts.tolist() == ([0, paid, 1024] if paid else [0, 1024])
    assert c.success.tolist() == ([0.3, 0.3, 0.5] if paid else [0.3, 0.5])
    assert c.clock.tolist()[1] == (8.0 if before else 9.0 if paid else 20.0)
    assert not c.has_curve, "the level is no measurement"


def test_weights_that_were_evaluated_twice_count_once(tmp_path):
    lines = [evaluation(0, 1.0, 0, 0.3), evaluation(0, 0.5, 263, 0.4), evaluation(8, 20.0, 640, 0.5)]
    assert read(tmp_path, lines, preheat_rollouts=512).rollouts.tolist() == [0, 640]
    c = read(tmp_path, [*lines[:2], line("rl", 1, clock_s=9.0), lines[2]], preheat_rollouts=512)
    assert c.rollouts.tolist() == [0, 512, 640]
    assert c.clock.tolist() == [1.0, 9.0, 20.0]


def test_the_time_to_publication_has_a_median_and_a_late_end(tmp_path):
    updates = [line("rl", i, clock_s=float(i), **{"async/publish_latency_s": float(i)}) for i in range(1, 102)]
    health = read(tmp_path, [evaluation(0, 0.5, 0, 0.3), *updates, evaluation(101, 102.0, 6464, 0.5)]).health
    assert (health["latency"], health["latency_p99"]) == (51.0, 100.0)


def test_the_wait_for_the_last_stragglers_is_left_out(tmp_path):
    updates = [line("rl", i, clock_s=2.0 * i) for i in range(1, 16)] + [line("rl", 16, clock_s=90.0)]
    c = read(tmp_path, [evaluation(0, 0.0, 0, 0.3), *updates, evaluation(16, 91.0, 1024, 0.5)])
    assert c.clock.tolist() == [0.0, 32.0], "14 updates took 28 s, so 16 take 32 s"
    level = line("preheat", 0, clock_s=10.0)
    updates = [line("rl", i, clock_s=10 + 2.0 * i) for i in range(1, 17)]
    c = read(tmp_path, [evaluation(0, 0.0, 0, 0.3), level, *updates, evaluation(16, 50.0, 1024, 0.5)],
             preheat_rollouts=512)  # fmt: skip
    assert c.clock.tolist() == [0.0, 10.0, 42.0]


def test_an_update_whose_kl_is_no_number_is_not_within_the_bound(tmp_path):
    kl = [{"actor/kl_after": 0.05, "rollout_corr/kl": 9.0}, {"actor/kl_after": None, "rollout_corr/kl": 0.01},
          {"rollout_corr/kl": 0.01}, {"rollout_corr/kl": None}, {"rollout_corr/kl": 0.06}]  # fmt: skip
    updates = [line("rl", i, clock_s=float(i), **keys) for i, keys in enumerate(kl)]
    c = read(tmp_path, [evaluation(0, 0.0, 0, 0.3), *updates, evaluation(5, 9.0, 64, 0.5)])
    assert c.health["kl_within"] == pytest.approx(2 / 5)


def test_the_health_of_a_run_that_falls_at_once_is_that_of_its_fall(tmp_path):
    updates = [line("rl", i, clock_s=float(i), **{"rollout_corr/ess": 1.0 - i / 10}) for i in range(1, 9)]
    lines = [
        evaluation(0, 0.0, 0, 0.8),
        *updates[:4],
        evaluation(4, 4.5, 256, 0.1),
        *updates[4:],
        evaluation(8, 8.5, 512, 0),
    ]
    c = read(tmp_path, lines)
    assert c.fell_at == 1
    assert c.health["ess"] == pytest.approx(1.0 - 2.5 / 10)


def test_a_level_that_is_none_is_not_reached_at_the_start():
    """GRPO ends below where all begin: every run is there at once, which says nothing."""
    fallen = [cell(m, s, [0.4, 0.2, 0.1, 0.1]) for m in ("grpo", "sao") for s in range(2)]
    assert all(math.isnan(r["steps"]) for r in comparison.rows(fallen, "grpo"))
    assert "| - | 2 (at 200) |" in comparison_tables.summary(fallen, "grpo")


def test_the_summary_says_what_all_runs_took():
    runs = [cell("sao", s, [0.2, 0.6], wall_s=w) for s, w in ((0, 90.0), (1, 30.0), (2, math.nan))]
    assert "3 runs, 2 minutes of wall clock added up" in comparison_tables.summary(runs, "sao")


def test_a_ratio_that_cannot_be_had_is_left_out(tmp_path):
    made = (("grpo", 0.0, ""), ("sao", 0.0, ""), ("grpo", 2.0, ""), ("sao", 2.0, "failed"))
    runs = [dataclasses.replace(cell(m, 0, [0.2, 0.6]), point={"env_sigma": s}, error=e) for m, s, e in made]
    assert "clock.png" in [p.name for p in comparison_tables.write(tmp_path, runs, reference="grpo")]


# -- whole comparisons, with a trainer that trains nothing -------------------------------------------------------------

TRAINER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir" if "--run-dir" in sys.argv else "--resume") + 1])
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
log = pathlib.Path(os.environ["TRAINER_LOG"])
with log.open("a") as file:
    file.write(folder.name + " " + str(sorted(os.sched_getaffinity(0))) + "\\n")
if (log.parent / "fail").exists() and (log.parent / "fail").read_text() in folder.name:
    print("error: it [/x] broke"); sys.exit(2)
sys.path.insert(0, os.environ["TRAINER_ROOT"])
from sao_jax.runtime.config import RunConfig
import typing
kinds = typing.get_type_hints(RunConfig)
def value(k, v):
    for kind in (int, float):
        try:
            return kind(v)
        except ValueError:
            pass
    return v
config = RunConfig(**{k[2:].replace("-", "_"): value(k, v) for k, v in flags.items() if k != "--run-dir"}).resolved()
(folder / "config.json").write_text(config.to_json())
rollouts = config.rollouts + (config.preheat_rollouts or 0)
with (folder / "metrics.jsonl").open("w") as file:
    for i in range(4):
        print(json.dumps({"stage": "eval", "step": i, "version": i, "clock_s": 10.0 * i, "sampled": rollouts * i // 3,
                          "eval/success": 0.2 + 0.1 * i + 0.01 * config.seed, "eval/n": 64}), file=file)
(folder / "evaluation.json").write_text("{}")
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that calls the command in this process and returns the runs that it started."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    log = tmp_path / "log"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, str(tmp_path / "trainer.py")))
    monkeypatch.setenv("TRAINER_LOG", str(log))
    monkeypatch.setenv("TRAINER_ROOT", str(ROOT))

    def call(*arguments):
        log.write_text("")
        monkeypatch.setattr(sys, "argv", ["ablate", "--results", str(tmp_path / "results"), *arguments])
        module.main(GracefulStop())
        return [line.split(" ")[0] for line in log.read_text().splitlines()]

    return call


FEW = ("--methods", "grpo, reinforce", "--seeds", "2")


def table(tmp_path, name="dis-vs-grpo"):
    with (tmp_path / "results" / name / "runs.csv").open() as file:
        return {(x["method"], x["seed"]): x["error"] for x in csv.DictReader(file)}


def test_a_comparison_goes_on_where_it_stopped(command, tmp_path):
    ran = command(*FEW)
    assert sorted(ran) == ["calculator_s0", "calculator_s1", "grpo_s0", "grpo_s1", "reinforce_s0", "reinforce_s1"]
    assert len(table(tmp_path)) == 4
    assert "| grpo | 2 |" in (tmp_path / "results" / "dis-vs-grpo" / "summary.md").read_text()
    assert command(*FEW) == []
    shutil.rmtree(tmp_path / "results" / "warm")
    assert command(*FEW) == [], "finished runs need no warm start"
    shutil.rmtree(tmp_path / "results" / "runs" / "grpo_s1")
    assert sorted(command(*FEW)) == ["calculator_s1", "grpo_s1"]
    assert command("--methods", "grpo", "--seeds", "1") == []
    assert len(table(tmp_path)) == 4, "what is there stays in the table"


def test_runs_that_fail_are_told_and_run_again(command, tmp_path):
    (tmp_path / "fail").write_text("reinforce")
    with pytest.raises(UserError, match="dis-vs-grpo: 2 of 4 runs did not finish"):
        command(*FEW)
    assert {k[0] for k, error in table(tmp_path).items() if error} == {"reinforce"}
    assert "it [/x] broke" in (tmp_path / "results" / "dis-vs-grpo" / "summary.md").read_text()
    (tmp_path / "fail").write_text("calculator")  # warm starts fail: finished runs stay finished
    with pytest.raises(UserError, match="2 of 6 runs"):
        command("--methods", "grpo,reinforce", "--seeds", "3")
    assert {k for k, error in table(tmp_path).items() if not error} >= {("grpo", "0"), ("grpo", "1")}
    (tmp_path / "fail").unlink()
    command(*FEW)
    assert not any(error for k, error in table(tmp_path).items() if k[1] in "01")


def test_a_smaller_call_does_not_replace_a_larger_table(command, tmp_path, capsys):
    command(*FEW)
    shutil.rmtree(tmp_path / "results" / "runs")  # as in a fresh clone, which has tables and no runs
    command("--methods", "grpo", "--seeds", "1")
    assert len(table(tmp_path)) == 4
    assert list(table(tmp_path, "dis-vs-grpo-partial")) == [("grpo", "0")]
    assert "it stays" in capsys.readouterr().out
    command("--methods", "grpo", "--seeds", "1", "--rollouts", "1024")
    assert list(table(tmp_path, "dis-vs-grpo-1024")) == [("grpo", "0")]


def test_a_run_that_a_killed_comparison_left_behind_is_waited_for(command, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    ledger = Ledger(folder / "ledger.sqlite", create=True)
    started = []

    def check():
        started.append((tmp_path / "log").exists())
        if len(started) == 2:
            ledger.close()

    assert module.finish_run(folder, {"baseline": "batch_mean"}, check) == ""
    assert started[:2] == [False, False]
    assert (tmp_path / "log").exists()


def test_each_run_has_a_core_of_its_own(command, tmp_path):
    command(*FEW)
    used = [line.split(" ", 1)[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert all(len(json.loads(cores)) == 1 for cores in used)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--jobs", "0"], "--jobs is 0"), (["--jobs", "99"], "each run has a core to itself"),
     (["--seeds", "0"], "--seeds is 0"), (["--methods", "nonsense"], "unknown method 'nonsense'"),
     (["--preset", "nonsense"], "unknown preset"),
     (["--rollouts", "300"], "leaves none after preheating"), (["--methods", ""], "--methods is empty"),
     (["--preset", "contest", "--jobs", "2"], "its runs go one by one"),
     (["--preset", "all", "--methods", "grpo"], "critic-lr has no effect"),
     (["--results", ""], "--results is empty"), (["--results", __file__], "is a file, not a folder"),
     (["--results", f"{__file__}/below"], "is a file, not a folder")],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_runs(command, tmp_path, arguments, says):
    with pytest.raises(ValueError, match=says):
        command(*arguments)
    assert (tmp_path / "log").read_text() == ""


def test_two_comparisons_do_not_share_a_folder(command, tmp_path):
    with module.only_one(tmp_path / "results"), pytest.raises(ValueError, match="another comparison is running"):
        command(*FEW)


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")
def test_a_run_ends_when_ablate_is_killed(tmp_path):
    """Else the next call would find a run that is still being written."""
    child = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from experiments import _cli\n"
    child += "def body(stop):\n  print('begun', flush=True)\n  while True:\n    stop.check(); time.sleep(.05)\n"
    child += "_cli.main(body)"
    script = f"import pathlib, sys; sys.path.insert(0, {str(ROOT)!r}); from experiments import ablate; "
    script += f"ablate.COMMAND = (sys.executable, '-c', {child!r}); "
    script += "ablate.finish_run(pathlib.Path(sys.argv[1]), {}, lambda: None)"
    output = tmp_path / "run" / "output.txt"

    def says(word, seconds=30):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if output.exists() and word in output.read_text():
                return True
            time.sleep(0.05)
        return False

    parent = subprocess.Popen([sys.executable, "-c", script, str(output.parent)])
    assert says("begun")
    parent.kill()
    parent.wait()
    assert says("stopped: ")
