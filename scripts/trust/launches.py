"""Drawn launches that should work: small models, layouts of at most eight ranks, and flags of Megatron."""

from __future__ import annotations

import random
from typing import Any

FLAGS = {
    "all": """
        --qk-layernorm; --qk-l2-norm; --apply-layernorm-1p; --use-mup; --attention-output-gate; --softmax-type learnable
        --apply-residual-connection-post-layernorm
        --attention-softmax-in-fp32; --window-size 32,0
        --calculate-per-token-loss; --accumulate-allreduce-grads-in-fp32; --disable-jit-fuser; --freeze-all-layers
        --log-num-zeros-in-grad; --log-params-norm; --optimizer sgd; --apply-wd-to-qk-layernorm
        --decoupled-lr 2e-3 --decoupled-min-lr 1e-4; --eod-mask-loss
        --start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear
        --reset-position-ids --reset-attention-mask; --no-create-attention-mask-in-dataloader
        --no-masked-softmax-fusion; --no-bias-dropout-fusion; --no-rope-fusion
        --mtp-num-layers 1; --mtp-num-layers 2 --mtp-use-repeated-layer; --no-clone-scatter-output-in-embedding
        --embedding-init-method-std 0.1; --make-vocab-size-divisible-by 96; --make-vocab-size-divisible-by 1
        --apply-query-key-layer-scaling
        --data-parallel-random-init; --mtp-num-layers 1 --mtp-detach-heads
        --check-weight-hash-across-dp-replicas-interval 1; --eval-micro-batch-size 2 --eval-global-batch-size 8
        --window-size 16,0 --window-attn-skip-freq 2; --softmax-type off-by-one
        --timing-log-level 2; --distribute-saved-activations
        --empty-unused-memory-level 1; --no-check-for-nan-in-loss-and-grad
        --check-for-large-grads; --check-for-spiky-loss; --exit-signal-handler
        --manual-gc-interval 1; --mlp-chunks-for-training 2
        --train-sync-interval 1; --deterministic-mode; --lr-warmup-init 1e-4
        --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --v-head-dim 16
        --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24
    """,
    "swiglu": "--glu-linear-offset 0.5; --activation-func-clamp-value 0.1; --no-bias-swiglu-fusion",
    "gelu": "--squared-relu; --openai-gelu; --no-bias-gelu-fusion",
    "rotary": "--rotary-percent 0.5; --rotary-interleaved; --use-rope-scaling; --no-rope-freq 2",
    "pipeline": """
        --num-layers-per-virtual-pipeline-stage 1; --num-virtual-stages-per-pipeline-rank 2
        --num-layers-per-virtual-pipeline-stage 1 --overlap-p2p-communication-warmup-flush
        --num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 3
        --decoder-first-pipeline-num-layers 1; --defer-embedding-wgrad-compute; --no-overlap-p2p-communication
        --decoder-last-pipeline-num-layers 1; --pipeline-model-parallel-layout Et|tttL
        --pipeline-model-parallel-layout Et|tt|t|L; --pipeline-model-parallel-layout E|t|ttt|L
        --num-layers-per-virtual-pipeline-stage 1 --overlap-param-gather-with-optimizer-step
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    """,
    "data": """
        --ddp-average-in-collective; --ddp-bucket-size 20000; --ddp-num-buckets 3
        --no-align-grad-reduce; --no-gradient-reduce-div-fusion; --use-tp-pp-dp-mapping
        --ddp-pad-buckets-for-high-nccl-busbw; --ddp-bucket-size 3000
    """,
    "sharded": """
        --num-distributed-optimizer-instances 2; --use-precision-aware-optimizer; --no-align-param-gather
        --ddp-reduce-scatter-with-fp32-accumulation
    """,
    # Not `mlp`: Megatron's recomputation of an MLP with biases does not end.
    "selective": "--recompute-modules core_attn layernorm; --recompute-modules layernorm",
    "bf16": "--grad-reduce-in-bf16; --disable-bf16-reduced-precision-matmul",
    "saved": """
        --no-ckpt-fully-parallel-save; --ckpt-fully-parallel-load; --dist-ckpt-optim-fully-reshardable
        --ckpt-assume-constant-structure
    """,
}
"""Flags of Megatron that some launches may have; `;` or the end of a line is between those that are drawn alone."""
MIXTURES: tuple[tuple[str, ...], ...] = (
    ("--moe-router-topk", "2"),
    ("--moe-router-topk", "1", "--moe-router-pre-softmax"),
    ("--moe-router-topk", "3", "--moe-aux-loss-coeff", "0.01"),
    ("--moe-router-topk", "2", "--moe-shared-expert-intermediate-size", "96"),
    ("--moe-router-topk", "2", "--moe-expert-capacity-factor", "1.0"),
    ("--moe-router-topk", "2", "--moe-router-score-function", "sigmoid"),
    ("--moe-router-topk", "2", "--moe-z-loss-coeff", "1e-3", "--moe-per-layer-logging"),
    ("--moe-router-topk", "2", "--moe-layer-freq", "2", "--moe-router-dtype", "fp64"),
    ("--moe-router-topk", "2", "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01"),
    ("--moe-router-topk", "4", "--moe-router-num-groups", "4", "--moe-router-group-topk", "2", "--moe-layer-recompute"),
    ("--moe-router-topk", "2", "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)


def drawn_launch(draw: random.Random) -> dict[str, Any]:
    """A launch config with the plugin. Megatron, or the plugin, may refuse some."""
    arch, heads = draw.choice(["gpt", "llama"]), draw.choice([4, 8])
    ranks = draw.choice([2] * 11 + [4] * 4 + [8])
    tensor, context, pipeline, data = draw.choice(layouts(ranks))
    varlen = draw.choice(
        ["none", "none", "balanced", "ring", "all_gather"] if pipeline == 1 and context > 1 else ["none"]
    )
    micro = 1 if varlen != "none" else draw.choice([1, 1, 2, 2, 3, 4])
    mixture = context == 1 and draw.random() < 0.2
    sequence_parallel = tensor > 1 and (mixture or draw.random() < 0.7)
    splits = [
        "auto",
        "none",
        *["batch"] * 2 * (micro % 2 == 0),
        *["sequence"] * 2 * (sequence_parallel and context == 1),
    ]
    with_queries = sequence_parallel and varlen == "none"
    attention = draw.choice(["row", "row", "row", "query_split"]) if with_queries else "row"
    method = draw.choice(["p2p", "p2p", "p2p", "auto", "auto", "fused", "none"])
    split = "none" if attention == "query_split" or tensor == 1 or method == "fused" else draw.choice(splits)
    deterministic = draw.choice([False, False, False, False, True, "tp_invariant"])
    schedules = ["auto", "auto", "direct", "serial", *["ring"] * sequence_parallel]
    schedule = draw.choice(schedules)
    if deterministic == "tp_invariant":
        method, attention, split, schedule = "p2p", "row", "none", "direct"
    expert = draw.choice([each for each in (1, 2, 2, 4) if data % each == 0]) if mixture else 1
    swiglu, sharded = draw.random() < 0.5, draw.random() < 0.5
    recompute = draw.choice(["none", "none", "none", "selective", "full"])
    precision, saved = draw.choice(["fp32", "fp32", "fp32", "bf16"]), draw.random() < 0.25
    pools = ["all", "swiglu" if swiglu else "gelu", recompute, precision]
    has = {"rotary": arch == "llama", "pipeline": pipeline > 1, "data": data > 1, "saved": saved}
    pools += [name for name, drawn in has.items() if drawn]
    pools += ["sharded"] * (sharded and data > 1)
    flags = " ".join(flag for name in pools for flag in drawn_flags(draw, name)).split()
    if mixture:
        sizes = ["--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", "1"]
        flags += ["--num-experts", "8", "--moe-token-dispatcher-type", "alltoall", *draw.choice(MIXTURES), *sizes]
    length = draw.choice([32, 64, 96, 104, 128, 33, 77, 127])
    multiple = (
        (tensor if sequence_parallel else 1) * (2 if split == "sequence" else 1) * (2 * context if context > 1 else 1)
    )
    dropouts = [0.0, 0.0, 0.0, 0.1]
    # Each rank draws masks for its own rows, and other methods of varlen attention distribute rows differently.
    comparable = varlen in ("none", "ring")
    return {
        "model": {
            "arch": arch,
            "num_layers": draw.choice([2, 2, 3, 4]) if pipeline == 1 else 4,
            "hidden_size": draw.choice([64, 96, 128]),
            "num_attention_heads": heads,
            "num_query_groups": draw.choice([heads, heads // 2, 2, 2, 1]),
            "kv_channels": draw.choice([None, None, 24]),
            "ffn_hidden_size": 8 * draw.randint(12, 50),
            "vocab_size": draw.choice([4000, 4001, 5000]),
            "max_position_embeddings": 128,
            "untie_embeddings": draw.random() < 0.5,
            "add_bias": not mixture and draw.random() < 0.5,
            "add_qkv_bias": draw.random() < 0.2,
            "swiglu": swiglu,
            "hidden_dropout": draw.choice(dropouts if comparable else [0.0] * len(dropouts)),
            "attention_dropout": 0.0 if context > 1 else draw.choice(dropouts),
            "normalization": draw.choice(["LayerNorm", "RMSNorm"]),
        },
        "parallel": {
            "tensor": tensor,
            "context": context,
            "pipeline": pipeline,
            "sequence_parallel": sequence_parallel,
        },
        "train": {
            "seq_length": length // multiple * multiple,
            "micro_batch_size": micro,
            "global_batch_size": micro * data * draw.choice([1, 2, 3, 4]),
            "iterations": 3,
            "precision": precision,
            "lr": 1e-3,
            "lr_warmup_iterations": 1,
            "transformer_impl": draw.choice(["local", "transformer_engine"]),
            "recompute": recompute,
            "distributed_optimizer": sharded,
            "cross_entropy_loss_fusion": draw.random() < 0.2,
            "manual_gc": draw.random() < 0.2,
            "eval_interval": draw.choice([1, 2]),
            "eval_iterations": draw.choice([0, 1, 2]),
            **({"save": "saved", "save_interval": 2} if saved else {}),
            "checkpoint_format": draw.choice(["torch_dist", "torch_dist", "torch"]),
        },
        "data": {"kind": "text", "path": "data/stdlib"} if varlen != "none" else {"kind": "mock"},
        "overlap": {
            "tensor": {
                "method": method,
                "kernels": draw.choice(["portable", "hopper"]),
                "autotune_cache": None,
                "schedule": schedule,
                "chunks_per_rank": draw.choice(["auto", "auto", 1, 2, 3, 5]),
                "recompute_output": draw.choice(["skip", "skip", "compute"]),
                "attention": attention,
                "split": split,
                "split_at": draw.choice(["auto", "auto", 0.3, 0.61]),
            },
            "data": {
                "method": draw.choice(["auto", "p2p", "p2p", "stock", "none"]) if data > 1 and expert == 1 else "stock",
                "accumulate": draw.choice(["auto", "fp32"]),
            },
            "ulysses": {
                "method": draw.choice(["p2p", "auto"]) if context > 1 and varlen == "none" else "none",
                "schedule": draw.choice(["auto", "auto", "direct", "serial"]),
                "head_groups": draw.choice(["auto", 1, 2]),
                "fuse_projections": draw.random() < 0.7,
            },
            "expert": {
                "method": draw.choice(["p2p", "p2p", "auto", "none"]) if expert > 1 else "none",
                "schedule": draw.choice(["direct", "direct", "serial"]),
            },
            "varlen": {
                "method": varlen,
                "capacity": draw.choice(["auto", "auto", 128]),
                "routing": draw.random() < 0.5,
            },
            "deterministic": deterministic,
            "check": {"every": draw.choice([0, 0, 0, 1, 2]), "on_mismatch": "error"},
            "strict": draw.random() < 0.1,
            "timeout_s": 60.0,
            "transport": draw.choice(["auto", "auto", "copies", "nccl"]),
            "register_buffers": draw.random() < 0.1,
            "trace": draw.random() < 0.15,
        },
        "launch": {"device": "cpu", "ranks_per_node": ranks, "timeout_s": 240.0},
        "megatron_args": ["--use-cpu-initialization", *flags],
    }


def drawn_flags(draw: random.Random, pool: str) -> list[str]:
    """Up to two flags of a pool; one where they exclude each other."""
    lines = FLAGS.get(pool, "").strip().splitlines()
    flags = [flag.strip() for line in lines for flag in line.split(";")]
    return draw.sample(flags, min(len(flags), draw.choice([0, 0, 1, 1, 2 - (pool == "pipeline")])))


def layouts(ranks: int) -> list[tuple[int, int, int, int]]:
    """Tensor, context, pipeline and data parallel sizes of `ranks` ranks, not of pipeline stages alone."""
    sizes = [each for each in (1, 2, 4) if ranks % each == 0]
    return [
        (tensor, context, pipeline, ranks // (tensor * context * pipeline))
        for tensor in sizes
        for context in sizes[:2]
        for pipeline in sizes[:2]
        if ranks % (tensor * context * pipeline) == 0 and pipeline < ranks
    ]
