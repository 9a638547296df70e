import json
import platform

import jax

from sao_jax.runtime.fingerprint import differences, fingerprint


def test_the_fingerprint_is_json_and_names_what_results_depend_on():
    present = fingerprint()
    assert json.loads(json.dumps(present)) == present
    assert present["jax"] == jax.__version__
    assert present["python"] == platform.python_version()
    assert (present["platform"], present["device_count"]) == (jax.default_backend(), jax.device_count())
    assert present["threads"] >= 1
    assert present["cpu"] or platform.system() != "Linux"


def test_a_fingerprint_does_not_differ_from_itself():
    assert differences(fingerprint(), fingerprint()) == []


def test_settings_that_change_results_are_seen():
    stored = fingerprint()
    with jax.default_matmul_precision("bfloat16"):
        assert differences(stored, fingerprint()) == ["jax_default_matmul_precision: None -> bfloat16"]


def test_differences_are_named_with_both_values():
    stored = {"jax": "0.10.2", "threads": 2, "old": True, "same": None}
    present = {"jax": "0.12.0", "threads": 2, "same": None, "new": 1}
    assert differences(stored, present) == ["jax: 0.10.2 -> 0.12.0", "old: True -> unknown", "new: unknown -> 1"]
