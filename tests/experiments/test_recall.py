import dataclasses
import json
import random
import sys
import types

import pytest

from experiments import recall
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.trajectory import TrajectoryBuilder, save_trajectory
from sao_jax.envs.dialogue import Dialogue
from sao_jax.runtime.ledger import Ledger

STOP = types.SimpleNamespace(check=lambda: None)


def played(family, index, forgetful) -> bytes:
    """A stored attempt by the expert, who answers nothing right if forgetful."""
    environment, rng = family.environment(), random.Random(index)
    encode = family.tokenizer.encode
    builder = TrajectoryBuilder(encode(environment.reset(family.instance("train", index))))
    end = None
    while end is None:
        action = environment.demonstrate(rng)
        if forgetful and " " not in action and action != "ok;":
            action = "ok;"
        tokens = encode(action)
        outcome = environment.step(action)
        builder.add_action(tokens, [-1.0] * len(tokens), [0] * len(tokens))
        builder.end_action()
        builder.add_reward(outcome.reward, outcome.parts)
        builder.add_observation(encode(outcome.observation))
        end = outcome.end
    return save_trajectory(builder.build(end))


def write_run(folder, *records: bytes):
    with Ledger(folder / "ledger.sqlite", create=True) as ledger, TrajectoryStore(folder / "trajectories") as store:
        for rollout, record in enumerate(records):
            ledger.admit(rollout, f"dialogue/train/{rollout}", rollout, 0)
            ledger.finish(rollout, dataclasses.asdict(store.append(record)), 1.0)


def shown(monkeypatch, capsys, *words) -> dict:
    monkeypatch.setattr(sys, "argv", ["recall", *map(str, words)])
    recall.main(STOP)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_table_counts_the_trajectories_that_were_stored_last_or_first(tmp_path, monkeypatch, capsys):
    family = Dialogue(noise=0)
    write_run(tmp_path, *(played(family, index, forgetful=index >= 6) for index in range(12)))
    first = shown(monkeypatch, capsys, tmp_path, "--n", 6, "--oldest")
    last = shown(monkeypatch, capsys, tmp_path, "--n", 6)
    assert first["trajectories"] == last["trajectories"] == 6
    assert all(row["share"] == 1.0 for row in first["recall"].values())
    asked, recalled = (sum(row[name] for row in last["recall"].values()) for name in ("asked", "recalled"))
    # One question of the user in each, which is answered wrongly; what the tools need is right.
    assert asked - recalled == 6


def test_what_holds_no_run_or_no_recall_is_an_error(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"no ledger\.sqlite"):
        shown(monkeypatch, capsys, tmp_path)
    builder = TrajectoryBuilder([1])
    builder.add_action([1], [0.0], [0])
    write_run(tmp_path, save_trajectory(builder.build("terminated")))
    with pytest.raises(ValueError, match="none of 1 trajectories"):
        shown(monkeypatch, capsys, tmp_path)
    with pytest.raises(ValueError, match="--n is 0"):
        shown(monkeypatch, capsys, tmp_path, "--n", 0)
