"""Curves, summary and page of a run folder."""

import base64
import html.parser
import io
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic_run import BATCH, make_lines, write_run

from sao_jax.report.curves import largest, moving_average, plot_run, run_figure, spread, thousands
from sao_jax.report.html import write_report
from sao_jax.report.run_folder import read_run, setting, stage_seconds
from sao_jax.report.summary import summarise, summary_table

PNG = b"\x89PNG\r\n\x1a\n"


def write(folder, lines, config=None):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def rl(rollouts, **values):
    return {"stage": "rl", "rollouts": rollouts, "version": rollouts // 10, **values}


def held_out(success, **values):
    return {"stage": "eval", "eval/success": success, **values}


# --- reading ---


def test_cut_and_foreign_lines_are_counted_not_fatal(tmp_path):
    write(tmp_path, [rl(10)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n\n{"stage": "rl", "rollouts": 20}\n{"stage": "rl", "rol')
    run = read_run(tmp_path)
    assert [line["rollouts"] for line in run.metrics] == [10, 20]
    assert summarise(tmp_path)["unreadable_lines"] == 2


def test_lines_written_again_after_a_resume_count_once(tmp_path):
    old = [held_out(0.1, rollouts=0), rl(10), rl(20, old=1), held_out(0.5, rollouts=20), rl(30, old=1)]
    new = [rl(20), held_out(0.6, rollouts=20), rl(30)]
    run = read_run(write(tmp_path, old + new))
    assert [line["rollouts"] for line in run.metrics if line["stage"] == "rl"] == [10, 20, 30]
    assert not any("old" in line for line in run.metrics)
    success = run_figure(run.metrics, {}).axes[0]
    (drawn,) = [bars[0].get_xydata().tolist() for bars in success.containers]
    assert drawn == [[0, 0.1], [20, 0.6]]
    assert summarise(tmp_path)["held_out"]["after"]["sampled"]["success"] == 0.6


def test_no_run_folder_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no metrics\.jsonl"):
        plot_run(tmp_path / "nowhere")
    write(tmp_path, [])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        summarise(tmp_path)


def test_settings_are_found_at_any_depth():
    assert setting({"a": {"b": {"kl_target": 0.05}}}, "kl_target") == 0.05
    assert setting({"a": {}}, "kl_target") is None


def test_stage_seconds_add_up_to_the_clock():
    lines = [
        {"stage": "warm_start", "time_s": 5.0},
        {"stage": "eval", "time_s": 7.0},
        {"stage": "rl", "time_s": None},
        {"stage": "rl", "time_s": 10.0},
        # Resumed from an earlier moment.
        {"stage": "rl", "time_s": 8.0},
        {"stage": "rl", "time_s": 12.0},
    ]
    assert stage_seconds(lines) == {"warm_start": 5.0, "eval": 2.0, "rl": 7.0}


# --- summary ---


def test_summary_by_hand(tmp_path):
    lines = [
        held_out(0.0, **{"eval/n": 10, "time_s": 1.0}),
        {"stage": "warm_start", "step": 10, "time_s": 11.0},
        held_out(0.25, **{"rollouts": 0, "time_s": 12.0}),
        held_out(0.5, **{"rollouts": 0, "eval/greedy": True, "time_s": 13.0}),
        {"stage": "preheat", "preheat/rollouts": 40, "time_s": 20.0},
        held_out(0.26, **{"rollouts": 0, "time_s": 21.0}),
        rl(10, **{
            "time_s": 23.0, "rollout_corr/logp_abs_diff": 2e-6, "actor/kl_after": 0.05, "actor/ppo_kl": 0.02,
            "actor/smooth_fraction": 1.0, "async/staleness_mean": 0.0, "async/staleness_max": 0,
            "async/dropped_stale": 1, "perf/tokens_per_s": 100.0, "perf/recompilations": 0, "actor/skipped_windows": 1,
            "critic/explained_var": 0.3, "async/publish_latency_s": 1.0,
        }),
        rl(20, **{
            "time_s": 24.0, "rollout_corr/logp_abs_diff": 0.5, "actor/kl_after": 0.06, "actor/ppo_kl": 0.06,
            "actor/smooth_fraction": 0.0, "async/staleness_mean": 1.0, "async/staleness_max": 3,
            "async/dropped_stale": 3, "perf/tokens_per_s": 300.0, "perf/recompilations": 2, "actor/skipped_windows": 2,
            "critic/explained_var": 0.4, "async/publish_latency_s": 2.0,
        }),
        rl(30, **{"time_s": 25.0, "perf/tokens_per_s": 200.0, "critic/explained_var": None,
                  "async/publish_latency_s": 9.0}),
        held_out(0.8, **{"rollouts": 30, "eval/low": 0.7, "eval/high": 0.9, "eval/n": 64, "time_s": 27.0}),
    ]  # fmt: skip
    write(tmp_path, lines, {"learner": {"kl_target": 0.05}})
    (tmp_path / "evaluation.json").write_text(json.dumps({"success": 0.9, "n": 100}))
    found = summarise(tmp_path)
    success = {m: {k: r["success"] for k, r in kinds.items()} for m, kinds in found["held_out"].items()}
    assert success == {
        "untrained": {"sampled": 0.0},
        "warm_start": {"sampled": 0.25, "greedy": 0.5},
        "before": {"sampled": 0.26},
        "after": {"sampled": 0.8},
        "evaluation": {"sampled": 0.9},
    }
    after, untrained = found["held_out"]["after"]["sampled"], found["held_out"]["untrained"]["sampled"]
    assert (after["low"], after["high"], after["n"]) == (0.7, 0.9, 64)
    # Bounds that the line lacks come from n: Wilson for 0 of 10.
    assert untrained["high"] == pytest.approx(0.277533, abs=1e-6)
    assert found["rollouts"] == {"preheat": 40, "rl": 30, "total": 70}
    assert found["updates"] == 3
    clock = {"warm_start": 10.0, "preheat": 7.0, "rl": 4.0, "eval": 6.0, "total": 27.0}
    assert found["wall_clock_s"] == pytest.approx(clock)
    assert list(found["wall_clock_s"]) == list(clock)
    assert found["tokens_per_s"] == 200.0
    assert found["staleness"] == {"mean": 0.5, "max": 3}
    assert found["kl"] == {"target": 0.05, "share_within": 0.5, "share_over_before": 0.5, "smooth_fraction": 0.5}
    assert found["dropped"] == {"stale": 3}
    assert found["skipped_windows"] == 3
    assert found["first_logp_abs_diff"] == 2e-6
    assert found["recompilations"] == 2
    assert found["explained_variance"] == 0.4
    assert found["publish_latency_s"] == 2.0
    assert found["unreadable_lines"] == 0


def test_the_evaluation_that_ended_a_run_is_not_told_twice(tmp_path):
    last = {"rollouts": 30, "version": 3, "eval/n": 64, "eval/low": 0.4, "eval/high": 0.6}
    write(tmp_path, [rl(30), held_out(0.5, **last), held_out(0.75, **last, **{"eval/greedy": True})])
    record = {"success": 0.5, "low": 0.4, "high": 0.6, "n": 64, "greedy_success": 0.75, "version": 3, "rollouts": 320}
    (tmp_path / "evaluation.json").write_text(json.dumps(record))
    assert list(summarise(tmp_path)["held_out"]) == ["after"]
    (tmp_path / "evaluation.json").write_text(json.dumps(record | {"greedy_success": 0.25}))
    found = summarise(tmp_path)["held_out"]["evaluation"]
    assert list(found) == ["greedy"]
    assert found["greedy"]["success"] == 0.25
    # Wilson for 16 of 64: (.28001 - .11025) / 1.06002.
    assert found["greedy"]["low"] == pytest.approx(0.160149, abs=1e-6)


def test_summary_of_an_empty_run_is_json_and_renders(tmp_path):
    write(tmp_path, [])
    found = json.loads(json.dumps(summarise(tmp_path), allow_nan=False))
    assert found["held_out"] == {}
    assert found["rollouts"] == {"preheat": None, "rl": None, "total": 0}
    assert found["recompilations"] is None
    Console(file=io.StringIO()).print(summary_table(tmp_path))


def test_table_shows_brackets_as_they_are_and_fits_60_columns(tmp_path):
    folder = write_run(tmp_path / "run [bold]x", updates=20)
    console = Console(file=io.StringIO(), width=60)
    console.print(summary_table(folder))
    out = console.file.getvalue()
    assert "run [bold]x" in out
    assert re.search(r"After RL, sampled .*\d\d\.\d%  \[\d\d\.\d%, \d\d\.\d%\]", out)
    assert all(len(line) <= 60 for line in out.splitlines())


# --- curves ---


def test_every_panel_of_a_full_run(tmp_path):
    folder = write_run(tmp_path)
    (path,) = plot_run(folder)
    assert path == folder / "curves.png"
    assert path.read_bytes().startswith(PNG)
    run = read_run(folder)
    figure = run_figure(run.metrics, run.config)
    assert titles(figure) == [
        "Success rate", "KL [nats/token]", "Explained variance of the critic", "Tokens outside the band",
        "Staleness [versions]", "Entropy [nats/token]", "Response length [tokens]", "Tokens/s", "Where the time goes",
        "Warm start: loss", "Preheating: explained variance",
    ]  # fmt: skip
    targets = [line.get_ydata()[0] for line in figure.axes[1].lines if line.get_label() == "target"]
    assert targets == [0.05]
    # No file is left half written.
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "curves.png", "metrics.jsonl"]


def test_drawing_leaves_pyplot_alone(tmp_path):
    write(tmp_path, [rl(64, **{"actor/entropy": 0.5})])
    before = sys.modules.get("matplotlib.pyplot")
    plot_run(tmp_path)
    assert sys.modules.get("matplotlib.pyplot") is before


def test_stages_share_no_axis(tmp_path):
    lines = make_lines(updates=5, seed=0)
    figure = run_figure([line for line in lines if line["stage"] in ("warm_start", "preheat")], {})
    assert titles(figure) == ["Warm start: loss", "Preheating: explained variance"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["steps", "epochs"]
    success = run_figure(lines, {}).axes[0]
    assert max(line.get_xdata().max() for line in success.lines) == 5 * BATCH


@pytest.mark.parametrize("lines", [[], [{}], [{"stage": "rl"}], [rl(10)], [held_out(None)], [{"stage": 7}]])
def test_no_data_no_panel_no_crash(lines):
    assert run_figure(lines, {}).axes == []


KEYS = sorted({k for line in make_lines(3, 0) for k in line} - {"stage"})


# Few examples: a figure takes a tenth of a second, and each example breaks several keys.
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_key_may_be_missing_null_or_not_finite(data):
    odd = st.sampled_from(["keep", "drop", None, float("nan"), float("inf"), "text", 0, -1.5])
    fate = data.draw(st.dictionaries(st.sampled_from(KEYS), odd, max_size=12))
    lines = []
    for line in make_lines(3, 0):
        kept = {k: v for k, v in line.items() if fate.get(k, "keep") == "keep"}
        lines.append(kept | {k: v for k, v in fate.items() if k in line and v not in ("keep", "drop")})
    run_figure(lines, {"kl_target": fate.get("actor/ppo_kl")})


def test_warm_start_steps_counted_down_are_shown_counted_up():
    lines = [{"stage": "warm_start", "step": step, "warm_start/loss": 1.0} for step in (-20, -10, 0)]
    (axes,) = run_figure(lines, {"warm_start_steps": 30}).axes
    assert axes.lines[0].get_xdata().tolist() == [10, 20, 30]


def test_a_key_that_went_missing_is_left_out(tmp_path):
    lines = [{k: v for k, v in line.items() if not k.startswith("timing_s/")} for line in make_lines(5, 0)]
    assert "Where the time goes" not in titles(run_figure(lines, {}))
    assert len(run_figure(lines, {}).axes) == 10


def test_one_line_is_visible():
    figure = run_figure([rl(64, **{"actor/entropy": 0.5, "timing_s/a": 1.0, "timing_s/b": 3.0})], {})
    entropy, shares = figure.axes
    assert entropy.lines[0].get_marker() == "o"
    assert [text.get_text() for text in shares.texts] == ["b 75%", "a 25%"]


def test_dollar_signs_are_not_mathematics(tmp_path):
    write(tmp_path, [rl(64, **{"actor/entropy": 0.5, "timing_s/a": 1.0})], {"task": "$\\broken{$"})
    plot_run(tmp_path)


def test_moving_average_by_hand():
    np.testing.assert_allclose(moving_average(np.array([1.0, 2.0, 6.0, 3.0]), 3), [1.5, 3.0, 11 / 3, 4.5])
    np.testing.assert_allclose(moving_average(np.array([1.0, 2.0]), 1), [1.0, 2.0])


def test_small_shares_are_added_up():
    names, columns = largest(["a", "b", "c"], np.array([[1.0, 5.0, 2.0], [1.0, 5.0, 2.0]]), 2)
    assert names == ["b", "other"]
    np.testing.assert_allclose(columns, [[5.0, 3.0], [5.0, 3.0]])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted))
def test_names_beside_the_shares_do_not_overlap(wanted):
    found = spread(np.array(wanted), 0.1)
    assert np.all(np.diff(found) >= 0.1 - 1e-9)
    assert found[0] >= 0.05 - 1e-9
    assert found[-1] <= 0.95 + 1e-9


def test_thousands():
    assert [thousands(x) for x in (0, 0.25, 999, 12_000, 2_500_000, float("inf"))] == [
        "0", "0.25", "999", "12k", "2.5M", "",
    ]  # fmt: skip


# --- page ---


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.text, self.open = [], [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_report_is_one_file_that_loads_nothing_and_escapes(tmp_path):
    folder = tmp_path / "a<b>&c"
    folder.mkdir()
    lines = [held_out(0.5, rollouts=0), rl(64, **{"actor/entropy": 0.5}), held_out(0.75, rollouts=64)]
    write(folder, lines, {"learner": {"kl_target": 0.05}, "note": "<script>alert('x')</script> & more"})
    page = write_report(folder).read_text()
    found = Links()
    found.feed(page)
    assert found.open == []
    (source,) = found.sources
    assert base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True).startswith(PNG)
    assert "script" not in found.tags
    assert "url(" not in page
    assert "http:" not in page
    assert "https:" not in page
    # Shown to the reader as it is, not as markup.
    assert "a<b>&c" in found.text
    assert "<script>alert('x')</script> & more" in found.text
    assert "learner.kl_target" in found.text
    assert "After RL, sampled75.0%" in found.text


def test_report_of_an_empty_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert write_report(tmp_path).read_text().startswith("<!DOCTYPE html>")
