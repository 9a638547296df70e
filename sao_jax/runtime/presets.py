"""Objectives by name, as the flags of theirs that a user has not given."""

PRESETS = {
    "seed": dict(policy_loss="dis", outside="clip", band="0.1,10", baseline="critic", kl="smooth"),
    "paper": dict(
        policy_loss="dis",
        outside="mask",
        eps_low=0.3,
        eps_high=5.0,
        baseline="critic",
        kl="off",
        preheat_rollouts=0,
        num_critic_only_steps=10,
        max_staleness=4,
    ),
    "grpo": dict(policy_loss="ppo", eps_low=0.2, eps_high=0.28, baseline="grpo", kl="off"),
}


# Options that mean nothing without a critic.
CRITIC_ONLY = (
    "lambd", "lambda_alpha", "critic_lambda", "gae_over", "segments", "whiten", "critic_targets", "critic_update",
    "critic_steps_per_actor", "value_clip", "freeze_critic", "critic_lr", "critic_grad_clip", "preheat_rollouts",
    "preheat_from", "preheat_epochs", "num_critic_only_steps",
)  # fmt: skip

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo")
