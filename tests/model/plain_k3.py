"""K3 in NumPy float64, one sequence, one token at a time: the formulas alone. An oracle for tests."""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, gain, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def act(gate, up, config):
    a = config.activation
    if a.kind == "situ":
        return a.gate_cap * np.tanh(gate / a.gate_cap) * sigmoid(gate) * a.up_cap * np.tanh(up / a.up_cap)
    if a.kind == "swiglu":
        return gate * sigmoid(gate) * up
    return sigmoid(gate) * up


def kda(p, x, c, eps):
    T, H, D = x.shape[0], c.num_heads, c.head_dim

    def conv(name):
        raw = x @ p[f"{name}_proj.weight"].T
        taps = p[f"{name}_conv1d.weight"][:, 0]  # [C, W]
        W = taps.shape[1]
        out = np.zeros_like(raw)
        for t in range(T):
            for w in range(W):
                if t - (W - 1) + w >= 0:
                    out[t] += taps[:, w] * raw[t - (W - 1) + w]
        return (out * sigmoid(out)).reshape(T, H, D)

    q, k, v = conv("q"), conv("k"), conv("v")
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * D**-0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    z = ((x @ p["f_a_proj.weight"].T) @ p["f_b_proj.weight"].T + p["dt_bias"]).reshape(T, H, D)
    rate = np.exp(p["A_log"])[:, None]
    g = c.gate_lower_bound * sigmoid(rate * z) if c.gate == "bounded" else -rate * np.log1p(np.exp(z))
    beta = sigmoid(x @ p["b_proj.weight"].T)
    S, out = np.zeros((H, D, D)), np.zeros((T, H, D))
    for t in range(T):
        for h in range(H):
            S[h] *= np.exp(g[t, h])[:, None]
            S[h] += beta[t, h] * np.outer(k[t, h], v[t, h] - S[h].T @ k[t, h])
            out[t, h] = S[h].T @ q[t, h]
    if c.output_gate == "full":
        gate = x @ p["g_proj.weight"].T
    else:
        gate = (x @ p["g_a_proj.weight"].T) @ p["g_b_proj.weight"].T
    y = rms(out, p["o_norm.weight"], eps).reshape(T, -1) * sigmoid(gate)
    return y @ p["o_proj.weight"].T


def mla(p, x, c):
    T, H = x.shape[0], c.num_heads
    nope, rope, dv, r = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    if c.q_lora_rank is None:
        q = x @ p["q_proj.weight"].T
    else:
        latent = rms(x @ p["q_a_proj.weight"].T, p["q_a_layernorm.weight"], c.latent_norm_eps)
        q = latent @ p["q_b_proj.weight"].T
    q = q.reshape(T, H, nope + rope)
    kv = x @ p["kv_a_proj_with_mqa.weight"].T
    latent, shared = rms(kv[:, :r], p["kv_a_layernorm.weight"], c.latent_norm_eps), kv[:, r:]
    content = (latent @ p["kv_b_proj.weight"].T).reshape(T, H, nope + dv)
    out = np.zeros((T, H, dv))
    for t in range(T):
        for h in range(H):
            logits = (
                np.array(
                    [q[t, h, :nope] @ content[s, h, :nope] + q[t, h, nope:] @ shared[s] for s in range(t + 1)]
                )
                * (nope + rope) ** -0.5
            )
            a = np.exp(logits - logits.max())
            out[t, h] = (a / a.sum()) @ content[: t + 1, h, nope:]
    out = out.reshape(T, -1)
    if c.gated:
        out = out * sigmoid(x @ p["g_proj.weight"].T)
    return out @ p["o_proj.weight"].T


def ffn(p, x, config):
    return act(x @ p["gate_proj.weight"].T, x @ p["up_proj.weight"].T, config) @ p["down_proj.weight"].T


def moe(p, x, config):
    c = config.moe
    scores = sigmoid(x @ p["gate.weight"].T)
    z = x @ p["routed_expert_down_proj.weight"].T if c.latent_width else x
    u = np.zeros_like(z)
    for t in range(x.shape[0]):
        chosen = np.argsort(-(scores[t] + p["gate.e_score_correction_bias"]))[: c.experts_per_token]
        weights = scores[t, chosen]
        if c.renormalize:
            weights = weights / (weights.sum() + 1e-20)
        for e, w in zip(chosen, weights * c.routed_scaling, strict=True):
            hidden = act(p["experts.w1"][e] @ z[t], p["experts.w3"][e] @ z[t], config)
            u[t] += w * (p["experts.w2"][e] @ hidden)
    if c.latent_norm:
        u = rms(u, p["routed_expert_norm.weight"], config.rms_norm_eps)
    y = u @ p["routed_expert_up_proj.weight"].T if c.latent_width else u
    return y + ffn(part(p, "shared_experts."), x, config) if c.num_shared_experts else y


def part(p, prefix):
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def mixed(rows, query, gain, eps):
    V = np.stack(rows)  # [S, T, d]
    scores = (V / np.sqrt((V * V).mean(-1, keepdims=True) + eps) * (query * gain)).sum(-1)
    a = np.exp(scores - scores.max(0))
    return ((a / a.sum(0))[..., None] * V).sum(0)


def hidden(p, config, tokens):
    """The trunk's output before its final norm, `[T, d]`."""
    eps, kind = config.rms_norm_eps, config.attn_res.kind
    stream, bank = p["embed_tokens.weight"][np.asarray(tokens)], []

    def read(name):
        if kind == "none" or not bank:
            return stream
        rows = bank if stream is None else [*bank, stream]
        return mixed(rows, p[f"{name}_proj.weight"][0], p[f"{name}_norm.weight"], eps)

    def opens(sublayer):
        return kind == "full" or (kind == "block" and sublayer % (2 * config.attn_res.block_size) == 0)

    for i in range(config.num_layers):
        q = part(p, f"layers.{i}.")
        for s, (mix_name, norm_name) in enumerate(
            [("self_attention_res", "input_layernorm"), ("mlp_res", "post_attention_layernorm")]
        ):
            h = read(f"layers.{i}.{mix_name}")
            if opens(2 * i + s):
                bank.append(stream)
                stream = None
            h = rms(h, q[f"{norm_name}.weight"], eps)
            if s == 0:
                attn = part(q, "self_attn.")
                out = mla(attn, h, config.mla) if config.is_mla(i) else kda(attn, h, config.kda, eps)
            elif config.is_moe(i):
                out = moe(part(q, "block_sparse_moe."), h, config)
            else:
                out = ffn(part(q, "mlp."), h, config)
            stream = out if stream is None else stream + out
    return read("output_attn_res")


def logits(p, config, tokens):
    """`[T, V]` for one sequence."""
    h = rms(hidden(p, config, tokens), p["norm.weight"], config.rms_norm_eps)
    return h @ (p["embed_tokens.weight"] if config.tie_embeddings else p["lm_head.weight"]).T


def mtp_logits(p, config, tokens):
    """`[T - 1, V]`: at token t >= 1, from its embedding and the trunk's hidden of t - 1."""
    eps, q = config.rms_norm_eps, part(p, "mtp.")
    trunk = hidden(p, config, tokens)
    embedded = p["embed_tokens.weight"][np.asarray(tokens)].copy()
    embedded[0] = 0
    before = np.concatenate([np.zeros_like(trunk[:1]), trunk[:-1]])
    x = np.concatenate([rms(embedded, q["enorm.weight"], eps), rms(before, q["hnorm.weight"], eps)], -1)
    x = x @ q["eh_proj.weight"].T
    layer = part(q, "layer.")
    x = x + mla(part(layer, "self_attn."), rms(x, layer["input_layernorm.weight"], eps), config.mla)
    x = x + moe(
        part(layer, "block_sparse_moe."), rms(x, layer["post_attention_layernorm.weight"], eps), config
    )
    x = rms(x, q["norm.weight"], eps)
    return (x @ (p["embed_tokens.weight"] if config.tie_embeddings else p["lm_head.weight"]).T)[1:]
