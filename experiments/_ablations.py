"""What the ablations compare: methods and presets, as data. A new one is a few lines here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# One cell of the headline preset, in flags of experiments.train. Preheating rollouts are part of the budget. A run is
# charged the time of one core and its simulated environments, so that several may go side by side.
BASE = dict(
    task="calculator",
    clock="cpu",
    devices=1,
    batch_size=64,
    eval_every=8,
    eval_tasks=256,
    env_seconds=0.1,
    env_sigma=1.29,
    checkpoint_every=1_000_000,
    keep_checkpoints=1,
)
BUDGET = 4096
PREHEAT = 512
# A small run without end, for what watches or kills runs.
SMALL = dict(dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, mlp_dim=128)
ENDLESS = SMALL | dict(
    task="calculator", batch_size=16, warm_start_steps=0, preheat_rollouts=0, rollouts=10**6, eval_every=0, eval_tasks=8
)
PROOF = "proof:level=0,top=2"  # of 4 to 16 steps
DIALOGUE = "dialogue:turns=0"  # of 8, 16 or 32
# Flags of the run that makes the starting policy of a task.
STARTS: Mapping[str, Mapping[str, Any]] = {PROOF: dict(context_window=128, warm_start_steps=300)}
SHORT = dict(batch_size=16, eval_every=16)  # of presets with many cells, which take 2,048 rollouts

# SAO in the form that is compared, and what each method changes. The learning rate is the best of four for SAO, GRPO
# and REINFORCE alike: see results/tune.
SAO = dict(preset="seed", preheat_rollouts=PREHEAT, lr=3e-4)
GRPO = dict(preset="grpo", lr=3e-4)
NO_CRITIC = dict(preset="seed", lr=3e-4)  # the band and KL smoothing of SAO, advantages from elsewhere

METHODS: Mapping[str, Mapping[str, Any]] = {
    "sao": SAO,
    "sao batch mean": NO_CRITIC | dict(baseline="batch_mean"),
    "sao running mean": NO_CRITIC | dict(baseline="running_mean"),
    "sao K=1": SAO | dict(critic_steps_per_actor=1),
    "sao attention free": SAO | dict(freeze_critic="none"),
    "sao lambda .95": SAO | dict(lambd=0.95),
    "sao lambda 1": SAO | dict(lambd=1.0),
    "sao all tokens": SAO | dict(gae_over="tokens"),
    "sao no preheating": SAO | dict(preheat_rollouts=0),
    "sao no band": SAO | dict(band="0,1e9", outside="mask"),
    "sao clip": SAO | dict(outside="clip"),
    "sao mask": SAO | dict(outside="mask"),
    "sao mask_sign": SAO | dict(outside="mask_sign"),
    "sao mask .2-4": SAO | dict(outside="mask", band="0.2,4"),
    "sao mask_sign .2-4": SAO | dict(outside="mask_sign", band="0.2,4"),
    "sao lower mask": SAO | dict(outside="mask", band="0.2,1e9"),
    "sao upper mask": SAO | dict(outside="mask", band="0,4"),
    "sao targets dis": SAO | dict(critic_targets="dis"),
    "sao critic on arrival": SAO | dict(critic_update="arrival"),
    "sao kl penalty": SAO | dict(kl="penalty"),
    "sao kl measured": SAO | dict(kl_target=1e6),  # nothing is shortened, the KL after each step is known
    "sao paper": dict(preset="paper", lr=3e-4, num_critic_only_steps=8),
    "grpo": GRPO,
    "grpo synchronous": GRPO | dict(max_staleness=0),
    "grpo dis": GRPO | dict(policy_loss="dis", outside="clip", band="0.1,10", kl="smooth"),
    "grpo dual clip": GRPO | dict(dual_clip=3.0),
    "dr.grpo": GRPO | dict(baseline="dr_grpo"),
    "rloo": GRPO | dict(baseline="rloo"),
    "ppo": SAO | dict(preset="grpo", baseline="critic"),
    "reinforce": dict(preset="seed", baseline="batch_mean", policy_loss="dis", outside="mask", band="0,1e9", kl="off",
                      lr=3e-4),
    "spo": NO_CRITIC | dict(baseline="spo", train_tasks=512),
    "gspo": GRPO | dict(policy_loss="gspo", eps_low=0.03, eps_high=0.04),
    # In a learner that steps once per batch the proximal policy is the current one, and these are rules of the band.
    "cispo": GRPO | dict(policy_loss="dis", outside="clip", band="0,1.28"),
    "icepop": GRPO | dict(policy_loss="dis", outside="mask", band="0.5,5"),
    "decoupled ppo": GRPO | dict(policy_loss="dis", outside="mask", band="0,1e9"),
    "a-3po": GRPO | dict(policy_loss="a3po"),
    "truncated is": GRPO | dict(policy_loss="tis", band="0,2"),
    "sequence mask": GRPO | dict(policy_loss="dis", outside="mask", band="0,1e9", sequence_kl=0.1),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """Methods, crossed with every combination of the values in `grid`, on a number of seeds.

    `flags` come on top of `BASE`; `reference` is the method that effects are measured against.
    """

    methods: tuple[str, ...]
    seeds: int = 5
    grid: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    budget: int = BUDGET
    reference: str = "grpo"


PRESETS: Mapping[str, Preset] = {
    "dis-vs-grpo": Preset(("sao", "grpo", "grpo dis", "reinforce"), seeds=10),
    "components": Preset(
        (
            "sao", "sao batch mean", "sao running mean", "sao K=1", "sao attention free", "sao lambda .95",
            "sao lambda 1", "sao all tokens", "sao no preheating", "sao no band", "sao targets dis",
            "sao critic on arrival", "sao paper", "grpo", "grpo dual clip", "dr.grpo", "rloo", "ppo", "reinforce",
            "spo", "gspo", "cispo", "icepop", "decoupled ppo", "a-3po", "truncated is", "sequence mask",
        ),
    ),
    "staleness": Preset(
        ("sao", "sao no band", "grpo", "reinforce"),
        grid={"forced_staleness": (0, 2, 4, 8, 16, 32, 64)},
        flags=SHORT,  # 64 versions are then 1,024 rollouts
        budget=2048,
    ),
    "rate": Preset(("sao", "sao no band", "grpo", "reinforce"), grid={"lr": (3e-4, 1e-3, 3e-3)}),
    "band": Preset(
        (
            "sao clip", "sao mask", "sao mask_sign", "sao mask .2-4", "sao mask_sign .2-4", "sao lower mask",
            "sao upper mask", "sao no band",
        ),
        grid={"forced_staleness": (4, 16), "lr": (3e-4, 1e-3)},
        flags=SHORT | dict(kl="off"),
        budget=2048,
        reference="sao no band",
    ),
    "kl": Preset(
        ("sao", "sao kl measured", "sao kl penalty"),
        grid={"forced_staleness": (0, 4), "lr": (3e-4, 3e-3)},
        flags=SHORT,
        budget=2048,
        reference="sao kl measured",
    ),
    "preheating": Preset(("sao", "sao no preheating"), reference="sao no preheating"),
    "math": Preset(("sao", "grpo", "reinforce"), flags=dict(task="mathword:level=1")),
    # Programs are judged in a sandbox, so the environment's time is real, and so is the clock.
    "contest": Preset(
        ("sao", "grpo", "reinforce"), flags=dict(task="contest:level=1", env_seconds=None, env_sigma=None, clock="wall")
    ),
    "repair": Preset(("sao", "grpo", "reinforce"), flags=dict(task="repair:level=1")),
    # Trained on short proofs, see the claim proof-length for how long ones they then find.
    "proof": Preset(("sao", "grpo", "reinforce"), seeds=3, flags=dict(task=PROOF, context_window=128), budget=3072),
    "dialogue": Preset(("sao", "grpo", "reinforce"), seeds=3, flags=dict(task=DIALOGUE)),
    # Simulated environments of growing spread, the median fixed; nothing is evaluated, the clock is what counts.
    "clock": Preset(
        ("sao", "reinforce", "grpo", "grpo synchronous"),
        seeds=3,
        grid={"env_sigma": (0.0, 0.65, 1.29, 2.0)},
        flags=dict(eval_every=0, eval_tasks=16),
        budget=1536,
    ),
    # Learning rates are chosen by success on training tasks, on seeds that no other preset uses.
    "tune": Preset(
        ("sao", "grpo", "reinforce"),
        seeds=2,
        grid={"lr": (1e-4, 3e-4, 1e-3, 3e-3)},
        flags=dict(eval_every=0, eval_tasks=16),
    ),
    "tune-critic": Preset(
        ("sao",),
        seeds=2,
        grid={"critic_lr": (4.5e-4, 1.5e-3, 5e-3)},
        flags=dict(eval_every=0, eval_tasks=16),
        reference="sao",
    ),
}  # fmt: skip
FIRST_SEED = {"tune": 1000, "tune-critic": 1000}
