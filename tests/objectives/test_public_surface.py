"""`import sao_jax as sao`: names, arguments, and that importing it costs nothing and starts nothing."""

import inspect
import os
import subprocess
import sys

import pytest

import sao_jax as sao

ARGUMENTS = {
    "importance_weights": "logp rollout_logp * low high outside advantages",
    "truncated_weights": "logp rollout_logp * cap",
    "clipped_ratio_loss": "logp old_logp advantages action_mask * low high dual_clip",
    "policy_loss": "logp weights advantages action_mask * denominator",
    "value_loss": "values returns action_mask * old_values clip",
    "gae": "rewards values action_mask * discount lambda_ bootstrap_value",
    "segmented_gae": "rewards values action_mask * discount lambda_ segment_ids mode bootstrap_value",
    "corrected_returns": "rewards values action_mask weights * discount lambda_ bootstrap_value",
    "length_adaptive_lambda": "num_action_tokens * alpha",
    "kl_divergence": "sample_logp target_logp * estimator",
    "update_kl_coefficient": "coef kl * target step_size",
    "smooth_update": "old_params proposed_params kl_fn * target",
    "group_advantages": "rewards group_ids * kind",
    "whiten": "x mask",
    "explained_variance": "values returns mask",
    "effective_sample_size": "log_ratio mask",
    "value_error": "values reference mask * reward_range",
}
WHOLE_BATCH = ("whiten", "explained_variance", "effective_sample_size", "value_error", "group_advantages")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_names_and_arguments_are_kept(name):
    parameters = inspect.signature(getattr(sao, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    promised, _, options = ARGUMENTS[name].partition(" * ")
    assert positional == promised.split()
    assert set(options.split()) <= set(keywords)
    # Whatever else there is has a default, so that the promised call works.
    extra = [p for p in parameters if p.name in set(keywords) - set(options.split())]
    assert all(p.default is not p.empty for p in extra)
    assert len(keywords) + len(positional) == len(parameters), "no *args, no **kwargs"


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_whole_batch_functions_take_an_axis_name(name):
    assert inspect.signature(getattr(sao, name)).parameters["axis_name"].default is None


def test_every_listed_name_exists_and_is_listed_once():
    assert len(set(sao.__all__)) == len(sao.__all__)
    assert set(sao.__all__) <= set(dir(sao))
    for name in sao.__all__:
        assert getattr(sao, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        sao.no_such_name  # noqa: B018


def run_python(code, **env):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})


def test_import_loads_nothing_heavy():
    code = "import sys, sao_jax; print(*sorted({'jax', 'jaxlib', 'flax', 'orbax', 'chex', 'numpy'} & set(sys.modules)))"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_first_use_loads_neither_flax_nor_orbax_and_starts_no_backend():
    """No backend can start on this platform, so whatever starts one fails."""
    use = "import sys, sao_jax; sao_jax.gae; sao_jax.Trajectory; assert not {'flax', 'orbax'} & set(sys.modules)"
    done = run_python(use, JAX_PLATFORMS="no_such_platform")
    assert done.returncode == 0, done.stderr
    starts = run_python("import jax; jax.numpy.zeros(1)", JAX_PLATFORMS="no_such_platform")
    assert starts.returncode != 0
