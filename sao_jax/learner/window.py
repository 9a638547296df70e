"""The gradient call: values, advantages and unnormalised gradient sums of one window of rows.

Everything here runs inside `shard_map`; each device sees its own rows. Shapes: R rows per device, L tokens.
Losses are sums; counts are summed beside them and divided by once, at the boundary.
"""

import functools

import jax
import jax.numpy as jnp

from sao_jax.learner import sharding
from sao_jax.learner.objective import Choices
from sao_jax.models.compute import PLAIN, Compute
from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import prefix_values
from sao_jax.models.decoder import bind
from sao_jax.models.logprobs import next_token_logprobs
from sao_jax.objectives import advantages, diagnostics, divergences, neighbours, policy, value, weights

POLICY_SUMS = (
    "tokens", "policy_count", "pg_loss", "entropy", "kl", "logp_abs_diff", "ratio", "ratio_sq", "nonfinite",
    "low", "low_pos", "low_neg", "high", "high_pos", "high_neg",
)  # fmt: skip
CRITIC_SUMS = (
    "value_count", "vf_loss", "returns", "returns_sq", "error", "error_sq", "advantage", "advantage_sq"
)  # fmt: skip
OTHER_SUMS = ("windows", "skipped", "critic_count")  # the last: tokens in the critic's gradient sum
SUMS = POLICY_SUMS + CRITIC_SUMS + OTHER_SUMS
MAXIMA = ("ratio_max",)


def score(choices: Choices, numbers: dict, scalars: dict, rows: dict, outputs, logp) -> dict:
    """Values, advantages and critic targets [R, L] of rows; nothing of it is differentiated.

    `outputs` [R, L] are the critic's as it is now, `logp` [R, L] the policy's, needed for importance-corrected targets
    only. With a given baseline the row's advantage stands at each of its action tokens.
    """
    mask = rows["action_mask"]
    if not choices.has_critic:
        return {"advantages": jnp.where(mask, rows["advantage"][:, None], 0.0)}
    values, bootstrap = own_values(rows, outputs)
    carries = None
    if "next_value" in rows:  # a trajectory may have several rows, see `links`
        # A row without one that follows keeps what an earlier batch left in its place.
        bootstrap = jnp.where(rows["followed"], rows["next_value"], bootstrap)
        carries = tuple(jnp.where(rows["followed"], rows[k], 0.0) for k in ("carry", "critic_carry"))
    raw, targets = estimates(choices, numbers, rows, rows["rewards"], values, bootstrap, logp, carries)
    used = raw
    if choices.whiten == "running":
        spread = jnp.sqrt(jnp.maximum(scalars["adv_sq"] - jnp.square(scalars["adv_mean"]), 1e-8))
        used = jnp.where(mask, (raw - scalars["adv_mean"]) / spread, 0.0)
    return {"values": values, "advantages": used, "advantages_raw": raw, "targets": targets}


def own_values(rows: dict, outputs) -> tuple[jax.Array, jax.Array]:
    """(values [R, L], bootstrap [R]: that of rows cut by us, 0 for the others), without gradient."""
    values, bootstrap = prefix_values(jax.lax.stop_gradient(outputs), rows["length"])
    return values, jnp.where(rows["truncated"], bootstrap, 0.0)


def estimates(choices: Choices, numbers: dict, rows: dict, rewards, values, bootstrap, logp, carries=None):
    """(advantages, critic targets) [R, L]; both are affine in rewards, values, bootstrap and carries together.

    `carries` = two [R] (policy's, critic's): advantage of the action token that comes next after the row's last. It
    enters the recursion as discount * lambda * carry on top of the last action token's reward.
    """
    mask, visited, critic_lambda = rows["action_mask"], visited_tokens(choices, rows), numbers["critic_lambda"]

    def plus(rewards, lambda_, carry):
        last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
        return rewards + jnp.where(last, (numbers["gamma"] * lambda_ * carry)[:, None], 0.0)

    def gae(rewards, lambda_):
        def estimate(rewards, values, mask, segments, lambda_, bootstrap):
            return advantages.segmented_gae(
                rewards,
                values,
                mask,
                discount=numbers["gamma"],
                lambda_=lambda_,
                segment_ids=segments,
                mode=choices.segments,
                bootstrap_value=bootstrap,
            )

        return jax.vmap(estimate)(rewards, values, visited, rows["segment_ids"], lambda_, bootstrap)

    policy_rewards = critic_rewards = rewards
    if carries is not None:
        policy_rewards = plus(rewards, rows["lambda_"], carries[0])
        critic_rewards = plus(rewards, critic_lambda, carries[1])
    raw, _ = gae(policy_rewards, rows["lambda_"])
    if choices.critic_targets == "mc":
        return raw, gae(critic_rewards, jnp.broadcast_to(critic_lambda, bootstrap.shape))[1]
    ratio = token_weights(choices, numbers, logp, rows["rollout_logp"], raw)
    corrected = functools.partial(advantages.corrected_returns, discount=numbers["gamma"], lambda_=critic_lambda)
    targets = jax.vmap(lambda r, v, m, f, b: corrected(r, v, m, f, bootstrap_value=b))(
        critic_rewards, values, mask, ratio, bootstrap
    )
    return raw, targets


LINKS = 7  # numbers per row that `chain` needs, see `links`


def links(choices: Choices, numbers: dict, rows: dict, outputs, logp) -> jax.Array:
    """What the row before each of `rows` in its trajectory needs of it: [R, 7].

    V of the row's first action token; and, for that token's advantage and for its (critic target - V), the constants of

        x = a + b V_next + c x_next

    where V_next and x_next are those of the first action token of the row that follows. Of the estimates, which are
    affine, b and c are the answers to a unit bootstrap and a unit carry where all else is 0: (discount lambda)^n for n
    action tokens, 0 where a seam of independent segments lies between.
    """
    values, bootstrap = own_values(rows, outputs)
    zeros, followed = jnp.zeros_like(values), rows["followed"].astype(jnp.float32)
    mask = rows["action_mask"]
    first = mask & (jnp.cumsum(mask, axis=1) == 1)

    def at_first(x):
        return jnp.where(first, x, 0.0).sum(axis=1)

    def answers(rewards, values, bootstrap, carry):
        raw, targets = estimates(choices, numbers, rows, rewards, values, bootstrap, logp, (carry, carry))
        return at_first(raw), at_first(targets - values)

    none = jnp.zeros_like(bootstrap)
    constant = answers(rows["rewards"], values, bootstrap * (1.0 - followed), none)
    unit = answers(zeros, zeros, followed, none)
    carried = answers(zeros, zeros, none, followed)
    return jnp.stack([at_first(values), *constant, *unit, *carried], axis=1)


def chain(choices: Choices, found: jax.Array, followed, seam, order) -> dict[str, jax.Array]:
    """Follows trajectories through their rows from last to first: {next_value, carry, critic_carry} [N].

    found: `links` of all N rows; order: int32 [N], the rows to visit, each one right after the row that follows it in
    its trajectory, padded with N. Other rows get 0.
    """
    size = found.shape[0]

    def step(index, carry):
        after, given = carry
        row = order[index]
        V, a, a_critic, b, b_critic, c, c_critic = found[row]
        crosses = followed[row] & ~seam[row] if choices.segments == "independent" else followed[row]
        runs_on = followed[row] if choices.critic_targets == "dis" else crosses  # corrected returns know no seams
        value, x, x_critic = jnp.where(jnp.stack([followed[row], crosses, runs_on]), after, 0.0)
        here = jnp.stack([V, a + b * value + c * x, a_critic + b_critic * value + c_critic * x_critic])
        return here, given.at[row].set(jnp.stack([value, x, x_critic]))

    start = jnp.zeros(3), jnp.zeros((size, 3))
    _, given = jax.lax.fori_loop(0, jnp.sum(order < size), step, start)
    return dict(zip(("next_value", "carry", "critic_carry"), given.T, strict=True))


def visited_tokens(choices: Choices, rows: dict) -> jax.Array:
    """The tokens [R, L] that advantages are propagated over and values are fitted at."""
    mask = rows["action_mask"]
    if choices.gae_over == "actions":
        return mask
    begun = jnp.cumsum(mask, axis=1) > 0
    return begun & (jnp.arange(mask.shape[1]) < rows["length"][:, None])


def token_weights(choices: Choices, numbers: dict, logp, rollout_logp, advantage):
    """Detached importance weights [R, L] by the rule in force."""
    if choices.policy_loss == "dis":
        band = functools.partial(
            weights.importance_weights,
            low=numbers["band_low"],
            high=numbers["band_high"],
            outside=choices.outside,
        )
        return jax.lax.stop_gradient(jax.vmap(lambda p, m, a: band(p, m, advantages=a))(logp, rollout_logp, advantage))
    truncate = functools.partial(weights.truncated_weights, cap=numbers["band_high"])
    return jax.lax.stop_gradient(jax.vmap(truncate)(logp, rollout_logp))


def policy_forward(config: ModelConfig, params: dict, rows: dict, compute: Compute = PLAIN):
    """(log-prob, entropy) [R, L] of the rows' action tokens, 0 elsewhere; "pack_ids" [R, L] where rows hold several
    trajectories."""
    model, packs = bind(config, params), rows.get("pack_ids")
    hidden = model(rows["tokens"], pack_ids=packs, compute=compute)
    return next_token_logprobs(
        hidden, model.head(), rows["tokens"], rows["temperature"], pack_ids_BxT=packs, live_BxT=rows["action_mask"],
        sequence_axis=compute.sequence_axis,
    )  # fmt: skip


def policy_terms(choices: Choices, numbers: dict, kl_coef, rows: dict, logp, entropy):
    """(loss sum, policy sums) of rows whose "advantages" are known; differentiable in `logp` [R, L].

    The loss holds the KL penalty unless that has a count of its own, see `penalty`.
    """
    mask, rollout_logp, advantage = rows["action_mask"], rows["rollout_logp"], rows["advantages"]
    band = {"low": numbers["band_low"], "high": numbers["band_high"]}
    if choices.policy_loss == "ppo":
        dual_clip = numbers["dual_clip"] if choices.dual_clip else None
        loss_of = functools.partial(policy.clipped_ratio_loss, **band, dual_clip=dual_clip)
        losses, counts = jax.vmap(loss_of)(logp, rollout_logp, advantage, mask)
    elif choices.policy_loss == "gspo":
        losses, counts = jax.vmap(functools.partial(neighbours.gspo_loss, **band))(logp, rollout_logp, advantage, mask)
    elif choices.policy_loss == "a3po":
        proximal = jax.vmap(neighbours.interpolated_logp)(logp, rollout_logp, rows["staleness"])
        loss_of = functools.partial(neighbours.decoupled_ppo_loss, **band)
        losses, counts = jax.vmap(loss_of)(logp, proximal, rollout_logp, advantage, mask)
    else:
        ratio = token_weights(choices, numbers, logp, rollout_logp, advantage)
        if choices.sequence_mask:
            near = functools.partial(neighbours.sequence_mask, delta=numbers["sequence_kl"])
            ratio *= jax.vmap(near)(logp, rollout_logp, mask)[:, None]
        loss_of = functools.partial(policy.policy_loss, denominator=choices.denominator)
        losses, counts = jax.vmap(loss_of)(logp, ratio, advantage, mask)
    loss = losses.sum()
    together = choices.kl == "penalty" and not choices.separate_penalty
    total = loss + penalty(kl_coef, rows, logp) if together else loss
    outside, tokens = diagnostics.band_counts(logp, rollout_logp, advantage, mask, **band)
    drift, _ = diagnostics.drift_sums(logp, rollout_logp, mask)
    sums = {
        "tokens": tokens,
        "policy_count": counts.sum(),
        "pg_loss": loss,
        "entropy": jnp.where(mask, entropy, 0.0).sum(),
        "ratio_max": diagnostics.largest_ratio(logp, rollout_logp, mask),
    }
    return total, jax.tree.map(lambda x: jax.lax.stop_gradient(x.astype(jnp.float32)), sums | drift | outside)


def penalty(kl_coef, rows: dict, logp):
    """The KL penalty's sum over rows; differentiable in `logp` [R, L]."""
    return kl_coef * divergences.rollout_kl(rows["rollout_logp"], logp, rows["action_mask"])[0]


def critic_loss(choices: Choices, numbers: dict, rows: dict, outputs):
    """Sum of the value loss over rows whose "targets" and old "values" are known; differentiable in `outputs`."""
    values, _ = prefix_values(outputs, rows["length"])

    def loss(values, targets, mask, old):
        clipped = {"old_values": old, "clip": numbers["value_clip"]} if choices.value_clip else {}
        return value.value_loss(values, targets, mask, **clipped)[0]

    return jax.vmap(loss)(values, rows["targets"], visited_tokens(choices, rows), rows["values"]).sum()


def critic_sums(rows: dict) -> dict:
    """Metric sums of the values as they were before the critic's step."""
    mask = rows["action_mask"]
    error = jnp.where(mask, rows["targets"] - rows["values"], 0.0)
    returns = jnp.where(mask, rows["targets"], 0.0)
    raw = jnp.where(mask, rows["advantages_raw"], 0.0)
    sums = {
        "value_count": mask.sum().astype(jnp.float32),
        "vf_loss": 0.5 * jnp.square(error).sum(),
        "returns": returns.sum(),
        "returns_sq": jnp.square(returns).sum(),
        "error": error.sum(),
        "error_sq": jnp.square(error).sum(),
        "advantage": raw.sum(),
        "advantage_sq": jnp.square(raw).sum(),
    }
    return sums


def frozen_as_constants(params, frozen):
    return jax.tree.map(lambda p, f: jax.lax.stop_gradient(p) if f else p, params, frozen)


def all_finite(tree) -> jax.Array:
    """True when every leaf on every device is finite."""
    bad = sum(jnp.sum(~jnp.isfinite(x)) for x in jax.tree.leaves(tree)) + jnp.zeros((), jnp.int32)
    return jax.lax.psum(bad, sharding.AXIS) == 0


TOKEN_FIELDS = ("tokens", "action_mask", "segment_ids", "rollout_logp", "rewards", "values", "advantages", "targets")


def take_window(buffer: dict, index, rows: int) -> dict:
    """The device's rows [R, ...] of window `index` from its part [1, slots, ...] of the buffer."""
    return {k: jax.lax.dynamic_slice_in_dim(v[0], index * rows, rows) for k, v in buffer.items()}


def shorten(data: dict, length: int) -> dict:
    """The rows' first `length` tokens, which are all of those rows that count."""
    if data["tokens"].shape[1] == length:
        return data
    short = {k: v[:, :length] if k in TOKEN_FIELDS else v for k, v in data.items()}
    return short | ({"length": jnp.minimum(data["length"], length)} if "length" in data else {})


def put_window(buffer: dict, index, rows: int, live, new: dict) -> dict:
    """Writes `new` fields of live rows back into the buffer."""
    out = dict(buffer)
    for name, fresh in new.items():
        old = jax.lax.dynamic_slice_in_dim(buffer[name][0], index * rows, rows)
        if fresh.shape != old.shape:  # a window computed at a shorter length; what lies behind it is never read
            old = old[:, : fresh.shape[1]]
        merged = jnp.where(live.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)
        out[name] = jax.lax.dynamic_update_slice_in_dim(buffer[name][0], merged, index * rows, 0)[None]
    return out


def add_sums(totals: dict, sums: dict, keep) -> dict:
    """Adds device-local sums [] to totals [1]; a window that is not kept counts as skipped only."""
    once = jnp.where(jax.lax.axis_index(sharding.AXIS) == 0, 1.0, 0.0)
    out = dict(totals)
    out["windows"], out["skipped"] = totals["windows"] + once, totals["skipped"] + jnp.where(keep, 0.0, once)
    for name, x in sums.items():
        x = jnp.where(keep, x, 0.0)[None]
        out[name] = jnp.maximum(totals[name], x) if name in MAXIMA else totals[name] + x
    return out
