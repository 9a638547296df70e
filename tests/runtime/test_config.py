import ast
import dataclasses
import inspect
import itertools
import json
import math
import re

import pytest

from sao_jax.runtime.config import CRITIC_ONLY, PRESETS, RunConfig, parse_band

SAMPLE = {
    "lambd": 0.9, "lambda_alpha": 2.0, "critic_lambda": 0.9, "gae_over": "tokens", "segments": "carried",
    "whiten": "batch",
    "critic_targets": "dis", "critic_update": "batch", "critic_steps_per_actor": 3, "value_clip": 0.1,
    "freeze_critic": "none", "critic_lr": 1e-3, "critic_grad_clip": 5.0, "preheat_rollouts": 5, "preheat_from": "x",
    "preheat_epochs": 3, "num_critic_only_steps": 2,
}  # fmt: skip


def test_every_critic_only_option_is_tried():
    assert set(SAMPLE) == set(CRITIC_ONLY)


@pytest.mark.parametrize("name", CRITIC_ONLY)
@pytest.mark.parametrize("baseline", [dict(preset="grpo"), dict(baseline="running_mean")])
def test_options_of_the_critic_are_errors_without_one(name, baseline):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} has no effect here; it needs --baseline critic"):
        RunConfig(**baseline, **{name: SAMPLE[name]}).resolved()
    others = {"preheat_epochs": {"preheat_rollouts": 8}}.get(name, {})
    assert RunConfig(**others, **{name: SAMPLE[name]}).resolved()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(policy_loss="ppo", outside="mask"), "--outside has no effect"),
        (dict(policy_loss="tis", outside="mask"), "--outside has no effect"),
        (dict(policy_loss="ppo", denominator="kept"), "--denominator has no effect"),
        (dict(denominator="kept"), "--denominator has no effect here; it needs --outside mask or mask_sign"),
        (dict(preset="paper", outside="clip", denominator="kept"), "--denominator has no effect"),
        (dict(policy_loss="tis", denominator="kept"), "--denominator has no effect"),
        (dict(policy_loss="tis", eps_low=0.3, eps_high=1.0), "--eps-low has no effect"),
        (dict(critic_update="arrival", micro_rows=2), "--micro-rows has no effect"),
        (dict(policy_loss="gspo", denominator="action"), "--denominator has no effect"),
        (dict(policy_loss="ppo", sequence_kl=0.1), "--sequence-kl has no effect here; it needs --policy-loss dis"),
        (dict(env_sleep=True), "--env-sleep has no effect here; it needs --env-seconds"),
        (dict(env_sleep=True, env_seconds=1.0, clock="cpu", devices=1), "--env-sleep has no effect here"),
        (dict(concurrency="auto", env_seconds=1.0), "--concurrency auto needs --env-sleep here"),
        (dict(concurrency=9, slots=8), "--concurrency is 9; it must be at most --slots 8"),
        (dict(env_sigma=1.0), "--env-sigma has no effect here; it needs --env-seconds"),
        (dict(baseline="spo"), "baseline spo keeps a count per task; it needs --train-tasks"),
        (dict(dual_clip=3.0), "--dual-clip has no effect"),
        (dict(drop_dead_groups=True), "--drop-dead-groups has no effect"),
        (dict(max_dead_groups=3), "--max-dead-groups has no effect"),
        (dict(preset="grpo", drop_dead_groups=False, max_dead_groups=3), "--max-dead-groups has no effect"),
        (dict(kl="off", kl_target=0.1), "--kl-target has no effect"),
        (dict(preset="paper", kl_target=0.1), "--kl-target has no effect"),
        (dict(kl_step=0.1), "--kl-step has no effect"),
        (dict(lambd=0.9, lambda_alpha=1.5), "--lambda-alpha has no effect"),
        (dict(preheat_from="x", preheat_rollouts=5), "--preheat-rollouts has no effect"),
        (dict(preheat_rollouts=0, preheat_epochs=5), "--preheat-epochs has no effect"),
        (dict(preset="paper", preheat_epochs=5), "--preheat-epochs has no effect"),
        (dict(preset="grpo", limit_bootstrap=True), "--limit-bootstrap has no effect"),
        (dict(critic_update="arrival", critic_steps_per_actor=2), "--critic-steps-per-actor has no effect"),
        (dict(critic_update="arrival", value_clip=0.2), "--value-clip has no effect"),
        (dict(critic_steps_per_actor=1, value_clip=0.2), "--value-clip has no effect"),
        (dict(init_from="x", warm_start_steps=5), "--warm-start-steps has no effect"),
        (dict(init_from="x", demonstrations=5), "--demonstrations has no effect"),
        (dict(warm_start_steps=0, warm_start_lr=1.0), "--warm-start-lr has no effect"),
        (dict(segment_steps=5, preset="grpo"), "--segment-steps has no effect"),
        (dict(gamma=0.9, preset="grpo"), "--gamma has no effect"),
    ],
)
def test_an_option_without_effect_is_an_error(flags, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**flags).resolved()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(band="0.1,10", eps_low=0.1, eps_high=0.2), "both set the band"),
        (dict(band="0.1,10", eps_low=0.1), "both set the band"),
        (dict(eps_low=0.3), "one end of the band is missing"),
        (dict(eps_high=0.3), "one end of the band is missing"),
        (dict(band="0.1"), "two numbers lo,hi"),
        (dict(band="a,b"), "two numbers lo,hi"),
        (dict(band="0.1,2,3"), "two numbers lo,hi"),
        (dict(band="0.3,5.0"), None),
        (dict(band="10,0.1"), "0 <= lo < 1 < hi"),
        (dict(band="-0.1,2"), "0 <= lo < 1 < hi"),
        (dict(band="nan,2"), "0 <= lo < 1 < hi"),
        (dict(eps_low=1.5, eps_high=2.0), "0 <= lo < 1 < hi"),
        (dict(eps_low=0.3, eps_high=-0.3), "0 <= lo < 1 < hi"),
    ],
)
def test_band(flags, message):
    if message is None:
        RunConfig(**flags).resolved()
        return
    with pytest.raises(ValueError, match=message):
        RunConfig(**flags).resolved()


@pytest.mark.parametrize("flags", [dict(preset="paper"), dict(outside="mask_sign"), dict(outside="mask")])
def test_the_denominator_may_be_what_is_kept_where_tokens_are_dropped(flags):
    assert RunConfig(**flags, denominator="kept").resolved().choices().denominator == "kept"


def test_truncation_has_no_lower_end():
    assert RunConfig(policy_loss="tis", eps_high=1.0).resolved().band_ends() == (0.0, 2.0)
    assert RunConfig(preset="paper", policy_loss="tis").resolved().band_ends() == (0.0, 6.0)
    assert RunConfig(policy_loss="tis").resolved().band_ends() == (0.1, 10.0)


def test_band_is_the_same_as_ends_and_as_offsets():
    assert RunConfig(band="0.7,6").resolved().band_ends() == pytest.approx((0.7, 6.0))
    assert RunConfig(eps_low=0.3, eps_high=5.0).resolved().band_ends() == pytest.approx((0.7, 6.0))
    assert parse_band(" 0.2, 4 ") == (0.2, 4.0)


@pytest.mark.parametrize(
    ("preset", "band", "expected"),
    [
        ("seed", (0.1, 10), dict(outside="clip", baseline="critic", kl="smooth", kl_target=0.05, preheat_rollouts=1024,
                                 segments="independent", segment_steps=100, n_samples_per_prompt=1)),
        ("paper", (0.7, 6.0), dict(outside="mask", baseline="critic", kl="off", kl_target=None, max_staleness=4,
                                   num_critic_only_steps=10, critic_steps_per_actor=2, lambda_alpha=1.5,
                                   critic_lambda=1.0, temperature=1.0)),
        ("grpo", (0.8, 1.28), dict(policy_loss="ppo", baseline="grpo", n_samples_per_prompt=8, drop_dead_groups=True,
                                   critic_lr=None, segments=None, outside=None)),
    ],
)  # fmt: skip
def test_presets(preset, band, expected):
    config = RunConfig(preset=preset).resolved()
    assert config.band_ends() == pytest.approx(band)
    assert {name: getattr(config, name) for name in expected} == expected
    config.choices()
    config.numbers().traced()
    assert config.model(20).vocab_size == 20


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("baseline", [None, "critic", "grpo", "rloo", "dr_grpo", "batch_mean", "running_mean"])
@pytest.mark.parametrize("loss", [None, "dis", "ppo", "tis"])
@pytest.mark.parametrize("kl", [None, "off", "smooth", "penalty"])
def test_choices_override_any_preset(preset, baseline, loss, kl):
    config = RunConfig(preset=preset, baseline=baseline, policy_loss=loss, kl=kl).resolved()
    for name, value in (("baseline", baseline), ("policy_loss", loss), ("kl", kl)):
        assert value is None or getattr(config, name) == value
    choices = config.choices()
    assert choices.policy_loss == config.policy_loss
    assert choices.has_critic == (config.baseline == "critic")
    assert (config.outside is None) == (config.policy_loss != "dis")
    assert RunConfig.from_json(config.to_json()) == config


def test_flags_reach_the_objective():
    config = RunConfig(
        band="0.5,2", gamma=0.9, lr=0.1, critic_lr=0.2, kl="penalty", kl_target=0.3, kl_step=0.4, value_clip=0.6,
        critic_lambda=0.7, critic_grad_clip=8.0, freeze_critic="none", lr_warmup=3, weight_decay=0.01, adam_eps=1e-3,
    ).resolved()  # fmt: skip
    numbers = config.numbers()
    assert (numbers.band_low, numbers.band_high, numbers.gamma, numbers.kl_target) == (0.5, 2.0, 0.9, 0.3)
    assert (numbers.lr, numbers.critic_lr, numbers.kl_step, numbers.value_clip) == (0.1, 0.2, 0.4, 0.6)
    assert (numbers.critic_lambda, numbers.critic_grad_clip, numbers.lr_warmup) == (0.7, 8.0, 3)
    assert (numbers.weight_decay, numbers.adam_eps) == (0.01, 1e-3)
    choices = config.choices()
    assert (choices.kl, choices.value_clip, choices.freeze) == ("penalty", True, ())


def test_a_number_of_zero_is_zero():
    numbers = RunConfig(critic_lr=0.0, critic_lambda=0.0).resolved().numbers()
    assert (numbers.critic_lr, numbers.critic_lambda) == (0.0, 0.0)


INTEGERS = [f.name for f in dataclasses.fields(RunConfig) if str(f.type).split(" ")[0].removesuffix("]") == "int"
            or f.type in (int, "int", int | None)]  # fmt: skip
FLOATS = [f.name for f in dataclasses.fields(RunConfig) if f.type in (float, "float", float | None)]

NEEDS = {
    "dual_clip": dict(policy_loss="ppo"), "kl_step": dict(kl="penalty"), "max_dead_groups": dict(baseline="grpo"),
    "preheat_epochs": dict(preheat_rollouts=8), "eps_low": dict(eps_high=0.2), "eps_high": dict(eps_low=0.2),
    "env_sigma": dict(env_seconds=1.0), "env_sleep": dict(env_seconds=1.0),
    "target_utilization": dict(concurrency="auto"), "worker_timeout": dict(workers=1),
}  # fmt: skip


def test_the_table_of_numbers_is_complete():
    assert {"rollouts", "batch_size", "devices", "keep_checkpoints", "preheat_rollouts", "dim"} <= set(INTEGERS)
    assert {"lr", "gamma", "temperature", "critic_lr", "lambd", "eps_low", "env_timeout"} <= set(FLOATS)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_numbers_out_of_range_are_errors(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is|the band is"):
        RunConfig(**NEEDS.get(name, {}), **{name: value}).resolved()


@pytest.mark.parametrize("name", INTEGERS)
def test_negative_counts_are_errors(name):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is -1|model \\w+ is -1"):
        RunConfig(**NEEDS.get(name, {}), **{name: -1}).resolved().model(10)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(preset="grpo", n_samples_per_prompt=1), "needs groups of at least 2"),
        (dict(baseline="rloo", n_samples_per_prompt=1), "needs groups of at least 2"),
        (dict(preset="grpo", batch_size=12), "not a multiple of --n-samples-per-prompt 8"),
        (dict(baseline="batch_mean", batch_size=1), "needs --batch-size of at least 2"),
        (dict(forced_staleness=1, max_staleness=2), "--max-staleness has no effect here"),
        (dict(forced_staleness=1, over_stale="drop"), "--over-stale must be train"),
        (dict(forced_staleness=1, over_stale="wait"), "--over-stale must be train"),
        (dict(temperature=0.0), "--temperature is 0.0; it must be above 0"),
        (dict(gamma=1.1), r"must lie in \[0, 1\]"),
        (dict(adam_b1=1.0), r"--adam-b1 is 1.0; it must lie in \[0, 1\), 1 excluded"),
        (dict(adam_b2=1.0), r"--adam-b2 is 1.0; it must lie in \[0, 1\), 1 excluded"),
        (dict(kl="penalty", kl_step=0.0), "--kl-step is 0.0; it must be above 0"),
        (dict(dual_clip=1.0, policy_loss="ppo"), "must be above 1"),
    ],
)
def test_contradictions_are_errors(flags, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**flags).resolved()


def test_a_config_file_with_an_unknown_key_is_refused():
    text = json.dumps(json.loads(RunConfig().to_json()) | {"dual_clipp": 3.0, "lrr": 1})
    with pytest.raises(ValueError, match=r"unknown keys: dual_clipp, lrr"):
        RunConfig.from_json(text)


def test_resolving_twice_changes_nothing():
    for preset in PRESETS:
        config = RunConfig(preset=preset).resolved()
        assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("batch_size", "64", "an integer"),
        ("batch_size", True, "an integer"),
        ("batch_size", 6.5, "an integer"),
        ("lr", "fast", "a number"),
        ("critic_lr", [1], "a number or null"),
        ("qk_norm", 1, "true or false"),
        ("preset", "papers", "seed, paper, grpo"),
        ("kl", 3, "smooth, penalty, off or null"),
        ("task", None, "a text"),
    ],
)
def test_a_config_file_with_a_value_of_a_wrong_type_is_refused(name, value, allowed):
    text = json.dumps(json.loads(RunConfig().resolved().to_json()) | {name: value})
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; it must be {allowed}")):
        RunConfig.from_json(text)


def test_every_flag_has_a_help_text():
    body = ast.parse(inspect.getsource(RunConfig)).body[0].body
    names = [
        field.target.id
        for field, after in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str))
    ]
    assert names == []


def test_a_run_of_an_earlier_version_is_read():
    import json

    from sao_jax.runtime.config import ADDED

    new = RunConfig(seed=3).resolved()
    old = {k: v for k, v in json.loads(new.to_json()).items() if k not in ADDED}
    assert RunConfig.from_json(json.dumps(old)) == new
